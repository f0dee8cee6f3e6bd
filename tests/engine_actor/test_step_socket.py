"""Step messages over a socket: in order and whole, for who has the secret, until either side goes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from engine_actor import step_socket
from engine_actor.step_socket import StepAddress, StepServer, read_steps

HOST = "127.0.0.1"
MESSAGES = [b"", b"one", bytes(300_000), b"last"]


async def everything(gateway: str) -> AsyncGenerator[bytes, None]:
    yield gateway.encode()
    for message in MESSAGES:
        yield message


async def read_all(address: StepAddress) -> list[bytes]:
    return [message async for message in read_steps(address)]


@pytest.fixture
async def server() -> AsyncIterator[StepServer]:
    server = StepServer(everything)
    yield server
    assert server._server is not None
    server._server.close()


async def test_messages_come_whole_and_in_order(server: StepServer) -> None:
    for gateway in ("a", "b"):
        assert await read_all(await server.admit(gateway, HOST)) == [gateway.encode(), *MESSAGES]


async def test_F11_a_secret_opens_one_connection_and_no_other_opens_any(server: StepServer) -> None:
    address = await server.admit("a", HOST)
    assert await read_all(dataclasses.replace(address, secret=bytes(32))) == []
    newer = await server.admit("a", HOST)
    assert await read_all(address) == [], "a newer one has taken its place"
    assert await read_all(newer) == [b"a", *MESSAGES]
    assert await read_all(newer) == [], "it was good for one connection"
    assert repr(newer.secret) not in repr(newer)


async def test_who_shows_no_secret_is_put_out(server: StepServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_socket, "_SECRET_SECONDS", 0.05)
    address = await server.admit("a", HOST)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(address.secret[:-1])
    assert await asyncio.wait_for(reader.read(), 5.0) == b""
    writer.close()


async def test_a_connection_that_breaks_inside_a_message_is_an_error() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(32)
        writer.write(b"\x00\x00\x00\x03one\x00\x00\x00\x09half")
        writer.close()

    server = await asyncio.start_server(half, HOST, 0)
    steps = read_steps(StepAddress(HOST, server.sockets[0].getsockname()[1], bytes(32)))
    assert await anext(steps) == b"one"
    with pytest.raises(OSError, match="broke"):
        await anext(steps)
    server.close()


async def test_nobody_there_is_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(OSError):
        await read_all(StepAddress(HOST, port, bytes(32)))


async def test_a_reader_that_goes_ends_the_connection() -> None:
    ended = asyncio.Event()

    async def forever(gateway: str) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield bytes(1000)
                await asyncio.sleep(0)
        finally:
            ended.set()

    server = StepServer(forever)
    steps = read_steps(await server.admit("a", HOST))
    await anext(steps)
    await steps.aclose()
    await asyncio.wait_for(ended.wait(), 5.0)
    assert server._server is not None
    server._server.close()
