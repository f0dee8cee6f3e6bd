"""Reservations against a tenant's limits, in Redis: all or nothing, exact under concurrency.

Rates are GCRA over Redis `TIME`, concurrency is a set of leases. All keys of a tenant share the hash tag
{tenant} and all expire by themselves, so that a gateway that dies leaves nothing behind for longer than a
lease.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis

from tenancy.guarded_redis import GuardedRedis, QuotaUnavailable, Script
from tenancy.models import Tenant

__all__ = ["Hold", "QuotaRefusal", "QuotaStore", "QuotaUnavailable", "RequestRate"]

_WINDOW_US = 60_000_000
_OWED_RETRY_S = 0.2
_OWED_FOR_S = 60.0


@dataclass(frozen=True)
class RequestRate:
    """State of requests_per_minute after a call, for headers. `reset_ms`: until all of it is there again."""

    limit: int
    remaining: int
    reset_ms: int


@dataclass(frozen=True)
class Hold:
    """What one request has reserved. End it once, with `settle` or `void`; renew it while the request lives.

    `rate_work_us` is the rate's part (units times emission interval, us), `slots` the concurrency's (0: no
    such limit).
    """

    id: str
    request_id: str
    tenant: str
    rate_work_us: int
    slots: int
    rate: RequestRate | None


@dataclass(frozen=True)
class QuotaRefusal:
    """Nothing was reserved. `retry_after_ms`: exact for the rate, a guess for slots, None for never."""

    code: Literal["rate_limit_exceeded", "concurrency_limit_exceeded"]
    limit_name: Literal["requests_per_minute", "max_concurrent_requests"]
    limit: int
    retry_after_ms: int | None
    rate: RequestRate | None


@dataclass(frozen=True)
class _Owed:
    """An ending that Redis has not confirmed. Both endings may safely be sent again."""

    script: Script
    hold: Hold
    since: float


class QuotaStore:
    """Reserves, settles, voids and renews.

    Callers may be cancelled at any await and need no shield. A `reserve` that was cancelled or got no answer
    may have been applied all the same, so the store voids it in the background; a `settle` or `void` that
    was cut short is sent again until Redis confirms it, for 60 s. By then the lease has lapsed.
    """

    def __init__(
        self,
        redis: Redis,
        prefix: str = "eh:v1",
        *,
        lease_ms: int = 30_000,
        probe_interval_s: float = 1.0,
    ) -> None:
        self._prefix = prefix
        self._lease_ms = lease_ms
        self._redis = GuardedRedis(redis, f"{prefix}:probe", probe_interval_s=probe_interval_s)
        self._reserve, self._settle, self._void, self._renew = map(
            Script, ("reserve", "settle", "void", "renew")
        )
        self._owed: dict[str, _Owed] = {}
        self._repaying: asyncio.Task[None] | None = None
        self._renewal = asyncio.Lock()
        self._ended_during_renewal: set[str] = set()

    @property
    def healthy(self) -> bool:
        """False from the third failure in a row until a probe gets through again. Readiness should say the
        same."""
        return self._redis.healthy

    async def reserve(
        self, tenant: Tenant, request_id: str, *, requests: int = 1, slots: int = 1
    ) -> Hold | QuotaRefusal:
        """Take `requests` rate units and `slots` concurrency leases, or nothing at all.

        A tenant without limits needs no Redis. Raises QuotaUnavailable, within the client's socket timeouts.
        """
        if requests < 1 or slots < 1:
            raise ValueError("requests and slots must be at least 1")
        limits = tenant.limits
        per_minute, concurrent = limits.requests_per_minute, limits.max_concurrent_requests
        # Rounded up, so that the rate is never above the limit.
        emission_us = 0 if per_minute is None else -(-_WINDOW_US // per_minute)
        hold_id, work_us = uuid.uuid4().hex, requests * emission_us
        leased = 0 if concurrent is None else slots
        if per_minute is None and concurrent is None:
            return Hold(hold_id, request_id, tenant.id, 0, 0, None)

        burst = limits.requests_burst or per_minute or 0
        args: list[str | int] = [
            hold_id,
            emission_us,
            burst,
            requests,
            -1 if concurrent is None else concurrent,
            leased,
        ]
        try:
            status, remaining, reset_us, retry_us = await self._redis.run(
                self._reserve, self._keys(tenant.id, hold_id), [*args, self._lease_ms * 1000]
            )
        except (QuotaUnavailable, asyncio.CancelledError) as error:
            if not isinstance(error, QuotaUnavailable) or error.maybe_applied:
                self._owe(self._void, Hold(hold_id, request_id, tenant.id, work_us, leased, None))
            raise

        rate = None if per_minute is None else RequestRate(per_minute, remaining, _ceil_ms(reset_us))
        retry_ms = None if retry_us < 0 else _ceil_ms(retry_us)
        if status == 1:
            assert per_minute is not None
            return QuotaRefusal("rate_limit_exceeded", "requests_per_minute", per_minute, retry_ms, rate)
        if status == 2:
            assert concurrent is not None
            return QuotaRefusal(
                "concurrency_limit_exceeded", "max_concurrent_requests", concurrent, retry_ms, rate
            )
        if status != 0:
            raise QuotaUnavailable("the reservation was withdrawn before it was made", maybe_applied=False)
        return Hold(hold_id, request_id, tenant.id, work_us, leased, rate)

    async def settle(self, hold: Hold) -> None:
        """End a hold whose request has run: slots are free at once, rate units stay spent.

        Never raises QuotaUnavailable. Without effect on a hold that has ended.
        """
        await self._end(self._settle, hold)

    async def void(self, hold: Hold) -> None:
        """End a hold whose request was refused later on: slots are free, and the rate gets back all of the
        hold that time has not used up by itself.

        Never raises QuotaUnavailable. Without effect on a hold that has ended.
        """
        await self._end(self._void, hold)

    async def renew(self, live_holds: Iterable[Hold]) -> int:
        """Renew the leases of the requests in the caller's live table; every third of a lease is a good pace.

        One round trip. A lease that lapsed while its request went on (a frozen Redis, one restarted empty)
        is taken again even above the limit, for the request does run: new ones are refused until the count
        is back below it. Returns how many holds that were. Raises QuotaUnavailable.
        """
        async with self._renewal:
            self._ended_during_renewal.clear()
            live = {hold.id: hold for hold in live_holds if hold.slots}
            lapsed = await self._renew_all(live.values(), again=False)
            # A hold that was settled since then has no lease either, and must not get one.
            gone = [live[id] for id in lapsed if id not in self._ended_during_renewal]
            await self._renew_all(gone, again=True)
            return len(gone)

    async def aclose(self) -> None:
        """Stop the background work. What is still owed lapses with its lease."""
        if self._repaying is not None:
            self._repaying.cancel()
            await asyncio.gather(self._repaying, return_exceptions=True)
        await self._redis.aclose()

    async def _end(self, script: Script, hold: Hold) -> None:
        if hold.id in self._owed or not (hold.rate_work_us or hold.slots):
            return
        if self._renewal.locked():
            self._ended_during_renewal.add(hold.id)
        try:
            await self._send_ending(script, hold, withdraw=False)
        except QuotaUnavailable:
            self._owe(script, hold)
        except asyncio.CancelledError:
            self._owe(script, hold)
            raise

    async def _send_ending(self, script: Script, hold: Hold, *, withdraw: bool) -> None:
        args: list[str | int] = [hold.id, hold.slots]
        if script is self._void:
            args = [hold.id, hold.rate_work_us, hold.slots, self._lease_ms if withdraw else 0]
        await self._redis.run(script, self._keys(hold.tenant, hold.id), args)

    def _owe(self, script: Script, hold: Hold) -> None:
        self._owed.setdefault(hold.id, _Owed(script, hold, time.monotonic()))
        if self._repaying is None or self._repaying.done():
            self._repaying = asyncio.create_task(self._repay())

    async def _repay(self) -> None:
        while self._owed:
            hold_id, owed = next(iter(self._owed.items()))
            try:
                await self._send_ending(owed.script, owed.hold, withdraw=True)
            except QuotaUnavailable:
                if time.monotonic() - owed.since < _OWED_FOR_S:
                    await asyncio.sleep(_OWED_RETRY_S)
                    continue
            del self._owed[hold_id]

    async def _renew_all(self, holds: Iterable[Hold], *, again: bool) -> list[str]:
        by_tenant: dict[str, list[str | int]] = {}
        for hold in holds:
            by_tenant.setdefault(hold.tenant, [self._lease_ms * 1000, int(again)]).extend(
                (hold.id, hold.slots)
            )
        if not by_tenant:
            return []
        calls = [([self._key(tenant, "slots")], args) for tenant, args in by_tenant.items()]
        replies = await self._redis.run_batch(self._renew, calls)
        return [id.decode() for reply in replies for id in reply]

    def _keys(self, tenant: str, hold_id: str) -> list[str]:
        return [self._key(tenant, name) for name in ("rpm", "open", "slots", f"withdrawn:{hold_id}")]

    def _key(self, tenant: str, name: str) -> str:
        return f"{self._prefix}:{{{tenant}}}:{name}"


def _ceil_ms(us: int) -> int:
    return -(-us // 1000)
