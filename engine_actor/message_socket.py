"""Messages between our own processes: frames of MessagePack over an authenticated socket, both ways at once.

Ray carries the same at more than a millisecond of CPU time a message. Who connects must show a secret first, which it
got in an actor call and which is good for one connection. Nothing that arrives can run code.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]
import numpy as np

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**20
"""Of one message, and of what a peer has not read yet: with more it is cut off."""

_LENGTH = struct.Struct("!I")
_SECRET_BYTES = 32
_SECRET_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_GONE_OPTIONS = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
"""A machine that is gone is noticed after some 11 seconds, with or without data on the way to it; a process that is
gone, at once."""


@dataclass(frozen=True)
class MessageAddress:
    """Where one peer connects to, and the secret that lets it in once."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class MessageConnection(asyncio.Protocol):
    """One end of a connection. `on_message` gets every message as it comes, `on_lost` is called once at the end, also
    after `close`; both in the event loop, and neither waits. An `on_message` that raises ends the connection.
    """

    def __init__(self) -> None:
        self.on_message: Callable[[bytes], None] = lambda message: None
        self.on_lost: Callable[[], object] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._resumed: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Nothing that is sent from now on arrives."""
        return self._transport is None or self._transport.is_closing()

    def send(self, message: bytes) -> None:
        """Send without waiting. A peer that leaves MAX_BYTES unread is cut off; to a closed one nothing is sent."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(_LENGTH.pack(len(message)) + message)
        if transport.get_write_buffer_size() > MAX_BYTES:
            logger.warning("a peer does not read: it is cut off")
            transport.abort()

    async def drained(self) -> None:
        """Wait until the peer has read most of what was sent, or the connection is over. One waiter at a time."""
        if self._resumed is not None:
            await self._resumed

    def close(self) -> None:
        """End the connection at once; what was sent just before may be lost."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _GONE_OPTIONS.items():
            if hasattr(socket, name):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= _LENGTH.size and not self.closed:
            (length,) = _LENGTH.unpack_from(received, begin)
            end = begin + _LENGTH.size + length
            if length > MAX_BYTES:
                logger.warning("a message of %d bytes is refused", length)
                self.close()
                break
            if len(received) < end:
                break
            try:
                self.on_message(bytes(received[begin + _LENGTH.size : end]))
            except Exception:
                logger.exception("a message could not be taken: the connection ends")
                self.close()
            begin = end
        del received[:begin]

    def pause_writing(self) -> None:
        self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        self.on_lost()


class MessageServer:
    """Lets peers in, each with a secret of its own."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._expected: dict[bytes, tuple[str, Callable[[MessageConnection], None]]] = {}

    async def admit(
        self, peer: str, host: str, accept: Callable[[MessageConnection], None]
    ) -> MessageAddress:
        """A new address for the peer; one it has not used yet no longer holds.

        `accept` gets the connection when it stands, to give it its handlers. The first call opens the port, on `host`.
        Raises OSError.
        """
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: _Stranger(self._let_in), host, 0)
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._expected = {old: one for old, one in self._expected.items() if one[0] != peer}
        self._expected[secret] = peer, accept
        host, port = self._server.sockets[0].getsockname()[:2]
        return MessageAddress(host, port, secret)

    def close(self) -> None:
        """Let nobody in any more. Connections stay."""
        if self._server is not None:
            self._server.close()

    def _let_in(self, secret: bytes, transport: asyncio.Transport) -> MessageConnection | None:
        expected = self._expected.pop(secret, None)
        if expected is None:
            return None
        connection = MessageConnection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        expected[1](connection)
        return connection


class _Stranger(asyncio.Protocol):
    """Whoever connects, until it has shown its secret."""

    def __init__(self, let_in: Callable[[bytes, asyncio.Transport], MessageConnection | None]) -> None:
        self._let_in = let_in
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(_SECRET_SECONDS, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._received += data
        secret, rest = self._received[:_SECRET_BYTES], self._received[_SECRET_BYTES:]
        if len(secret) < _SECRET_BYTES:
            return
        self._timer.cancel()
        connection = self._let_in(secret, self._transport)
        if connection is None:
            self._transport.abort()
        elif rest:
            connection.data_received(rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()


async def connect(
    address: MessageAddress, on_message: Callable[[bytes], None], on_lost: Callable[[], object]
) -> MessageConnection:
    """The other end. Raises OSError; a wrong secret shows as a connection that is lost."""
    connection = MessageConnection()
    connection.on_message, connection.on_lost = on_message, on_lost
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await asyncio.wait_for(
            loop.create_connection(lambda: connection, address.host, address.port), _CONNECT_SECONDS
        )
    except asyncio.TimeoutError:
        raise OSError("nobody accepts the connection") from None
    transport.write(address.secret)
    return connection


def pack(values: Any) -> bytes:
    """Plain values, tuples, lists and dictionaries; a dataclass becomes the tuple of its fields."""
    packed: bytes = msgpack.packb(values, default=_plain)
    return packed


def unpack(data: bytes) -> Any:
    """What `pack` was given, with tuples for lists and dataclasses. Raises ValueError."""
    return msgpack.unpackb(data, use_list=False)


def fields_of(record: Any) -> tuple[Any, ...]:
    """The values of a dataclass, in order."""
    return tuple([getattr(record, each.name) for each in fields(record)])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else fields_of(value)
