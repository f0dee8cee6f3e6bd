"""How many gateways there are, kept in Redis and remembered while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from tenancy.guarded_redis import GuardedRedis, QuotaUnavailable, Script
from tenancy.tasks import end

BEAT_S = 3.0
LAPSE_S = 15.0


class Presence:
    """One gateway's heartbeat. `count` is what the last beat saw, itself included; None before the first."""

    def __init__(self, redis: GuardedRedis, prefix: str) -> None:
        self._redis = redis
        self._key = f"{prefix}:gateways"
        self._id = uuid.uuid4().hex
        self._script = Script("presence")
        self._task: asyncio.Task[None] | None = None
        self.count: int | None = None

    def start(self) -> None:
        """Beat until `aclose`. Call it on the loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._beat())

    async def beat(self) -> None:
        """Be counted for LAPSE_S from now. Raises QuotaUnavailable."""
        self.count = await self._redis.run(self._script, [self._key], [self._id, round(LAPSE_S * 1e6)])

    async def aclose(self) -> None:
        """Stop, and be counted no more."""
        if self._task is None:
            return
        await end(self._task)
        with contextlib.suppress(QuotaUnavailable):
            await self._redis.run(self._script, [self._key], [self._id, 0])

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(QuotaUnavailable):  # the guard has logged it
                await self.beat()
            await asyncio.sleep(BEAT_S)
