"""Connections to Redis whose timeouts count the time in which the event loop looked for an answer.

A loop that parses and tokenises a burst of requests turns seldom: of a plain timeout of 100 ms it may use all on others
while the reply lies in the socket. Taken for an outage, that would refuse requests though Redis is well.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import TimeoutError as RedisTimeoutError

from tenancy.tasks import end

_LOOKS = 10
"""So often at least the loop turns before an answer counts as missing. Connecting takes five turns."""

T = TypeVar("T")
ConnectionKind = TypeVar("ConnectionKind", bound=type[AbstractConnection])


async def within_loop_time(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of `work`. Raises asyncio.TimeoutError after so many seconds of a loop that is never late.

    Time in which the loop was held up counts as one tenth of `seconds` at most, however long it was.
    """
    task = asyncio.create_task(work)
    try:
        for _ in range(_LOOKS):
            await asyncio.wait({task}, timeout=seconds / _LOOKS)
            if task.done():
                return task.result()
    finally:
        await end(task)
    raise asyncio.TimeoutError


def loop_timed(kind: ConnectionKind) -> ConnectionKind:
    """The same kind of connection, with `socket_timeout` (of reads) and `socket_connect_timeout` in loop time."""
    return cast(ConnectionKind, type(f"LoopTimed{kind.__name__}", (_LoopTimed, kind), {}))


class _LoopTimed(AbstractConnection):
    async def connect(self) -> None:
        """As it is, but one that is cancelled between the socket and the handshake is closed: the pool would hand it to
        the next caller half made."""
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await self.disconnect(nowait=True)
            raise

    async def _connect(self) -> None:
        limit, self.socket_connect_timeout = self.socket_connect_timeout, None
        connecting = super()._connect()  # type: ignore[no-untyped-call, safe-super]
        try:
            await (connecting if limit is None else within_loop_time(connecting, limit))
        finally:
            self.socket_connect_timeout = limit

    async def read_response(
        self, disable_decoding: bool = False, timeout: float | None = None, **options: Any
    ) -> Any:
        if timeout is not None or self.socket_timeout is None:
            return await super().read_response(disable_decoding, timeout, **options)
        reading = super().read_response(disable_decoding, math.inf, **options)
        try:
            return await within_loop_time(reading, self.socket_timeout)
        except asyncio.TimeoutError:  # the cancelled read has closed the connection
            raise RedisTimeoutError(f"Timeout reading from {self._host_error()}") from None
