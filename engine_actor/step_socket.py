"""Step messages over a socket: one connection per gateway, one frame per step.

A generator of Ray's carries the same at more than a millisecond of CPU time a message. Who connects must show a
secret first, which the engine gave to the gateway in an actor call and which is good for one connection.
Frames are MessagePack: nothing that arrives here can run code.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

_LENGTH = struct.Struct("!I")
_SECRET_BYTES = 32
_SECRET_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A machine that is gone is noticed after so many seconds; a process that is gone, at once."""


@dataclass(frozen=True)
class StepAddress:
    """Where one gateway reads its steps, and the secret that lets it in once."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class StepServer:
    """Lets gateways in and sends each its messages: what `messages(gateway)` yields, until that ends."""

    def __init__(self, messages: Callable[[str], AsyncGenerator[bytes, None]]) -> None:
        self._messages = messages
        self._server: asyncio.Server | None = None
        self._expected: dict[bytes, str] = {}

    async def admit(self, gateway: str, host: str) -> StepAddress:
        """A new address for the gateway; one it has not used yet no longer holds. The first call opens the port, on
        `host`. Raises OSError."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, host, 0)
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._expected = {old: name for old, name in self._expected.items() if name != gateway}
        self._expected[secret] = gateway
        host, port = self._server.sockets[0].getsockname()[:2]
        return StepAddress(host, port, secret)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            secret = await asyncio.wait_for(reader.readexactly(_SECRET_BYTES), _SECRET_SECONDS)
            gateway = self._expected.pop(secret, None)
            if gateway is not None:
                _keep_alive(writer)
                async with aclosing(self._messages(gateway)) as messages:
                    async for message in messages:
                        writer.write(_LENGTH.pack(len(message)) + message)
                        await writer.drain()
        writer.close()


async def read_steps(address: StepAddress) -> AsyncGenerator[bytes, None]:
    """Messages of an engine until it closes the connection. Raises OSError, also where that breaks."""
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(address.host, address.port), _CONNECT_SECONDS
        )
    except asyncio.TimeoutError:
        raise OSError("the engine does not accept a connection") from None
    try:
        _keep_alive(writer)
        writer.write(address.secret)
        while header := await reader.read(_LENGTH.size):
            header += await reader.readexactly(_LENGTH.size - len(header))
            yield await reader.readexactly(*_LENGTH.unpack(header))
    except asyncio.IncompleteReadError:
        raise OSError("the connection to the engine broke") from None
    finally:
        writer.close()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
