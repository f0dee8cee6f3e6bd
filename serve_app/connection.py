"""One HTTP exchange over ASGI: bounded body, withheld status line, and the moment the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.errors import (
    request_timeout,
    request_too_large,
    unsupported_encoding,
    unsupported_media_type,
)
from serve_app.within import within

BODY_TIMEOUT_SECONDS = 30.0


CLOSE = (b"connection", b"close")
"""On an answer to a request that has not been read whole: nobody may go on sending what nobody wants."""


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Connection:
    """Reads one request and writes one response. `status` is None until the status line has been sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.status: int | None = None
        self.before_answer: Callable[[bytes], Awaitable[None]] | None = None
        """Called with a whole answer (status 200) before it is sent."""
        self._receive = receive
        self._send = send
        self._whole = False

    async def read_body(self, limit: int) -> bytes:
        """The whole body, which must be JSON as it is: not compressed, in UTF-8.

        Raises ApiError 415, 413 above `limit` bytes, 408 when it does not end; ClientGoneError.
        """
        media_type, *parameters = self.headers.get("content-type", "application/json").lower().split(";")
        charsets = {p.replace(" ", "").replace('"', "") for p in parameters if "charset" in p}
        if media_type.strip() != "application/json" or not charsets <= {"charset=utf-8", "charset=utf8"}:
            raise unsupported_media_type()
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise unsupported_encoding()
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise request_too_large(limit)
        try:
            return await within(BODY_TIMEOUT_SECONDS, self._read(limit))
        except asyncio.TimeoutError:
            raise request_timeout() from None

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
                self._whole = True
                return bytes(body)

    async def wait_until_gone(self) -> None:
        """Returns when the client has closed the connection. Call after the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """A whole response."""
        await self.send_content(
            status,
            json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(),
            headers,
        )

    async def send_content(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """A whole response that is JSON already."""
        if status == 200 and self.before_answer is not None:
            await self.before_answer(content)
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
        if not self._whole:
            raw.append(CLOSE)
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


class CloseUnread:
    """ASGI middleware for what is no `Connection`: an answer that comes before the body's end ends the connection.

    `but` names the paths where a POST sees to it itself.
    """

    def __init__(self, app: ASGIApp, but: frozenset[str]) -> None:
        self._app = app
        self._but = but

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = scope["type"] != "http" or (scope["method"] == "POST" and scope["path"] in self._but)
        if own or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        whole = False

        async def read() -> Message:
            nonlocal whole
            message = await receive()
            whole = not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not whole:
                MutableHeaders(scope=message).raw.append(CLOSE)
            await send(message)

        await self._app(scope, read, answer)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )
