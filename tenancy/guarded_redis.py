"""Scripts on a Redis that may be slow, frozen, restarted or gone: a bounded wait, and then a clear error."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from tenancy.tasks import end

logger = logging.getLogger(__name__)

_PROBE = "return redis.call('SET', KEYS[1], '1', 'PX', 1000)"


class QuotaUnavailable(Exception):
    """Redis gave no answer. `maybe_applied` tells whether the command may have reached it all the same."""

    def __init__(self, message: str, *, maybe_applied: bool) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class Script:
    """A Lua script from `tenancy/lua`, with the SHA-1 that Redis knows it by. `library` is put in front."""

    def __init__(self, name: str, library: str | None = None) -> None:
        folder = Path(__file__).parent / "lua"
        names = [name] if library is None else [library, name]
        self.text = "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in names)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class GuardedRedis:
    """Runs scripts with at most `max_in_flight` at a time, behind a circuit breaker.

    After `failures_to_open` failures in a row every call fails at once, and one background task tries a
    small write every `probe_interval_s` until it works: no caller pays for the probing, and `healthy`
    recovers without traffic. How long a call may take is the business of the client's socket timeouts (see
    `tenancy.redis.connect`); the client must not retry, since a script that timed out may have run.
    """

    def __init__(
        self,
        redis: Redis,
        probe_key: str,
        *,
        failures_to_open: int = 3,
        probe_interval_s: float = 1.0,
        max_in_flight: int = 32,
    ) -> None:
        self._redis = redis
        self._probe_key = probe_key
        self._failures_to_open = failures_to_open
        self._probe_interval_s = probe_interval_s
        self._turns = asyncio.Semaphore(max_in_flight)
        self._failures = 0
        self._probing: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """False while the breaker is open."""
        return self._probing is None

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """The script's reply. Raises QuotaUnavailable."""
        self._refuse_if_open()
        async with self._turns:
            self._refuse_if_open()  # it may have opened while this call waited for its turn
            try:
                try:
                    reply = await self._redis.evalsha(script.sha, len(keys), *keys, *args)
                except NoScriptError:
                    # EVAL rather than SCRIPT LOAD and EVALSHA: no gap for another SCRIPT FLUSH, one
                    # permission less.
                    reply = await self._redis.eval(script.text, len(keys), *keys, *args)
            except (RedisError, OSError) as error:
                raise self._failed(error) from error
        self._failures = 0
        return reply

    async def aclose(self) -> None:
        """Stop probing. The client stays open: it belongs to whoever made it."""
        await end(self._probing)

    def _refuse_if_open(self) -> None:
        if self._probing is not None:
            raise QuotaUnavailable("the quota store is not answering", maybe_applied=False)

    def _failed(self, error: Exception) -> QuotaUnavailable:
        self._failures += 1
        if self._failures >= self._failures_to_open and self._probing is None:
            logger.warning("quota store unavailable: %s: %s", type(error).__name__, error)
            self._probing = asyncio.create_task(self._probe())
        return QuotaUnavailable(f"the quota store failed: {type(error).__name__}", maybe_applied=True)

    async def _probe(self) -> None:
        while True:
            try:
                await self._redis.eval(_PROBE, 1, self._probe_key)
                break
            except (RedisError, OSError):
                await asyncio.sleep(self._probe_interval_s)
        logger.info("quota store available again")
        self._failures = 0
        self._probing = None
