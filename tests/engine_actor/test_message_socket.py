"""Messages over a socket: in order and whole, both ways, for who has the secret, until either side goes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest

from engine_actor import message_socket
from engine_actor.message_socket import (
    MessageAddress,
    MessageConnection,
    MessageServer,
    connect,
    pack,
    unpack,
)

HOST = "127.0.0.1"
MESSAGES = [b"", b"one", bytes(300_000), b"last"]

pytestmark = pytest.mark.timeout(20)


class End:
    """One end of a connection: what it has heard, and its loss."""

    def __init__(self) -> None:
        self.connection: MessageConnection
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost = asyncio.Event()

    def accept(self, connection: MessageConnection) -> None:
        self.connection = connection
        connection.on_message, connection.on_lost = self.heard.put_nowait, self.lost.set

    async def connect(self, address: MessageAddress) -> End:
        self.connection = await connect(address, self.heard.put_nowait, self.lost.set)
        return self

    async def hear(self, count: int) -> list[bytes]:
        return [await asyncio.wait_for(self.heard.get(), 5.0) for _ in range(count)]

    async def is_lost(self) -> bool:
        await asyncio.wait_for(self.lost.wait(), 5.0)
        return self.connection.closed and self.heard.empty()


@pytest.fixture
async def server() -> AsyncIterator[MessageServer]:
    server = MessageServer()
    yield server
    server.close()


async def a_pair(server: MessageServer) -> tuple[End, End]:
    """Both ends of a connection that stands: the server's and the client's."""
    there = End()
    here = await End().connect(await server.admit("a", HOST, there.accept))
    here.connection.send(b"hello")
    assert await there.hear(1) == [b"hello"]
    return there, here


async def test_messages_come_whole_and_in_order_both_ways_at_once(server: MessageServer) -> None:
    there, here = await a_pair(server)
    for message in MESSAGES:
        here.connection.send(message)
        there.connection.send(message + b"!")
    assert await there.hear(4) == MESSAGES
    assert await here.hear(4) == [message + b"!" for message in MESSAGES]
    here.connection.close()
    assert await there.is_lost() and await here.is_lost()
    here.connection.send(b"nobody hears this")
    await there.connection.drained()


async def test_a_message_that_comes_in_pieces_is_put_together(server: MessageServer) -> None:
    there = End()
    address = await server.admit("a", HOST, there.accept)
    _, writer = await asyncio.open_connection(address.host, address.port)
    whole = address.secret + b"\x00\x00\x00\x03one\x00\x00\x00\x00\x00\x00\x00\x04last"
    for place in range(len(whole)):
        writer.write(whole[place : place + 1])
        await writer.drain()
        await asyncio.sleep(0)
    assert await there.hear(3) == [b"one", b"", b"last"]
    writer.write(b"\x00\x00\x00\x09half")
    writer.close()
    assert await there.is_lost(), "half a message is none"


async def test_F11_a_secret_opens_one_connection_and_no_other_opens_any(server: MessageServer) -> None:
    there = End()
    address = await server.admit("a", HOST, there.accept)
    assert await (await End().connect(dataclasses.replace(address, secret=bytes(32)))).is_lost()
    newer = await server.admit("a", HOST, there.accept)
    assert await (await End().connect(address)).is_lost(), "a newer one has taken its place"
    here = await End().connect(newer)
    here.connection.send(b"in")
    assert await there.hear(1) == [b"in"]
    assert await (await End().connect(newer)).is_lost(), "it was good for one connection"
    assert not there.connection.closed
    assert repr(newer.secret) not in repr(newer)
    here.connection.close()


async def test_who_shows_no_secret_is_put_out(server: MessageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_socket, "_SECRET_SECONDS", 0.05)
    address = await server.admit("a", HOST, lambda connection: pytest.fail("it has no secret"))
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(address.secret[:-1])
    assert await asyncio.wait_for(reader.read(), 5.0) == b""
    writer.close()


async def test_nobody_there_is_an_error(server: MessageServer) -> None:
    address = await server.admit("a", HOST, lambda connection: None)
    server.close()
    with pytest.raises(OSError):
        await connect(address, lambda message: None, lambda: None)


async def test_B05_a_peer_that_does_not_read_is_cut_off(
    server: MessageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_socket, "MAX_BYTES", 2**20)
    there = End()
    address = await server.admit("a", HOST, there.accept)
    _, writer = await asyncio.open_connection(address.host, address.port, limit=2**10)
    writer.write(address.secret + b"\x00\x00\x00\x02in")
    assert await there.hear(1) == [b"in"]
    sent = 0
    while not there.connection.closed:
        there.connection.send(bytes(100_000))
        sent += 1
        await asyncio.sleep(0)
        assert sent < 1000, "the sockets on the way hold some megabytes"
    assert await there.is_lost()
    writer.close()


async def test_what_lags_can_be_waited_for(server: MessageServer) -> None:
    there, here = await a_pair(server)
    here.connection.on_message = there.heard.put_nowait
    assert here.connection._transport is not None
    here.connection._transport.pause_reading()
    while there.connection._resumed is None:
        there.connection.send(bytes(1_000_000))
    waiting = asyncio.create_task(there.connection.drained())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    here.connection._transport.resume_reading()
    await asyncio.wait_for(waiting, 5.0)
    here.connection.close()


async def test_too_long_a_message_ends_the_connection(
    server: MessageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = await a_pair(server)
    monkeypatch.setattr(message_socket, "MAX_BYTES", 100)
    here.connection.send(bytes(101))
    assert await there.is_lost() and await here.is_lost()


async def test_a_message_that_cannot_be_taken_ends_the_connection(server: MessageServer) -> None:
    there, here = await a_pair(server)
    there.connection.on_message = unpack  # type: ignore[assignment]
    here.connection.send(b"\xc1")
    here.connection.send(b"\xc1")
    assert await there.is_lost() and await here.is_lost()


def test_plain_values_and_records_are_packed() -> None:
    values = (1, "a", None, 2.5, (1, 2), {"a": 3})
    assert unpack(pack(values)) == values
    address = MessageAddress("h", 1, b"s")
    assert unpack(pack([address, np.int64(2**40), 2**64 - 1])) == (("h", 1, b"s"), 2**40, 2**64 - 1)
