"""A gateway as an engine sees it: the other end of its channel, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_actor.actor import EngineActor
from engine_actor.channel_messages import Abort, Renew, Submit, SubmitAnswer, pack_request, unpack_answer
from engine_actor.message_socket import MessageConnection, connect
from engine_actor.request import EngineRequest, StreamRow


class GatewayEnd:
    """Rows wait in `rows` from step to step; `lost` is set when the engine has ended the connection."""

    def __init__(self) -> None:
        self.connection: MessageConnection
        self.rows: asyncio.Queue[tuple[StreamRow, ...]] = asyncio.Queue()
        self.lost = asyncio.Event()
        self._answers: asyncio.Queue[SubmitAnswer] = asyncio.Queue()
        self._number = 0

    def hear(self, data: bytes) -> None:
        message = unpack_answer(data)
        if isinstance(message, SubmitAnswer):
            self._answers.put_nowait(message)
        else:
            self.rows.put_nowait(message.rows)

    async def submit(self, *requests: EngineRequest) -> str | None:
        """Why they were not taken."""
        self._number += 1
        self.connection.send(pack_request(Submit(self._number, list(requests))))
        number, refusal = await asyncio.wait_for(self._answers.get(), 5.0)
        assert number == self._number
        return refusal

    def send(self, message: Abort | Renew) -> None:
        self.connection.send(pack_request(message))

    async def rows_until(self, ended: int = 1) -> list[StreamRow]:
        """Rows until so many requests have ended."""
        rows: list[StreamRow] = []
        while sum(row.finish_reason is not None for row in rows) < ended:
            rows += await asyncio.wait_for(self.rows.get(), 10.0)
        return rows


@asynccontextmanager
async def gateway_end(engine: EngineActor, name: str = "g") -> AsyncIterator[GatewayEnd]:
    """A gateway that is connected: the engine's hello has come."""
    end = GatewayEnd()
    end.connection = await connect(await engine.open_channel(name), end.hear, end.lost.set)
    assert await asyncio.wait_for(end.rows.get(), 5.0) == ()
    try:
        yield end
    finally:
        end.connection.close()


async def answers(engine: EngineActor, *requests: EngineRequest) -> list[StreamRow]:
    """All rows of requests that a gateway of their own submits."""
    async with gateway_end(engine, "of its own") as gateway:
        assert await gateway.submit(*requests) is None
        return await gateway.rows_until(len(requests))
