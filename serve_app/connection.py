"""One HTTP exchange over ASGI: bounded body, withheld status line, and the moment the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from serve_app.api.errors import request_too_large
from serve_app.within import within

BODY_TIMEOUT_SECONDS = 30.0


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Connection:
    """Reads one request and writes one response. `status` is None until the status line has been sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.status: int | None = None
        self._receive = receive
        self._send = send

    async def read_body(self, limit: int) -> bytes:
        """The whole body. Raises ApiError 413 above `limit` bytes, ClientGoneError when it never ends."""
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise request_too_large(limit)
        try:
            return await within(BODY_TIMEOUT_SECONDS, self._read(limit))
        except asyncio.TimeoutError:
            raise ClientGoneError from None

    async def _read(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > limit:
                raise request_too_large(limit)
            if not message.get("more_body", False):
                return bytes(body)

    async def wait_until_gone(self) -> None:
        """Returns when the client has closed the connection. Call after the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """A whole response."""
        content = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        await self._start(
            status, {"content-type": "application/json", "content-length": str(len(content)), **headers}
        )
        await self._send({"type": "http.response.body", "body": content})

    async def start_stream(self, headers: Mapping[str, str]) -> None:
        """Status line and headers of an event stream."""
        await self._start(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **headers,
            },
        )

    async def send_event(self, data: bytes) -> None:
        """Some whole events, flushed at once."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
