"""Reservations against limits, in Redis: all or nothing, exact under concurrency, gone with a dead gateway.

Rates are logs of the last minute, concurrency and budgets counts; `tenancy/lua/lib.lua` says how they are
kept. All keys of a tenant share the hash tag {tenant}. Time is Redis `TIME` alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

from redis.asyncio import Redis

from tenancy.guarded_redis import GuardedRedis, QuotaUnavailable, Script
from tenancy.layout import PREFIX
from tenancy.ledger import LedgerRow
from tenancy.limits import Check, Demand, Used, applicable, checks, estimate_price
from tenancy.models import LimitName, Limits, Price, Tenant
from tenancy.outage import Outage
from tenancy.owed import DONE_MS, Ending, OwedEndings
from tenancy.presence import Presence

__all__ = ["PREFIX", "Demand", "Hold", "QuotaRefusal", "QuotaStore", "QuotaUnavailable", "Rate", "Used"]

logger = logging.getLogger(__name__)

RESERVE_ATTEMPTS = 2
LEASE_MS = 18_000
"""How long a hold lives that nobody renews. With the sweep of the ledger's writer every 10 s, what a dead gateway held
is gone within 30 s."""


RefusalCode = Literal[
    "rate_limit_exceeded", "tokens_limit_exceeded", "concurrency_limit_exceeded", "budget_exceeded"
]
_CODES: dict[str, RefusalCode] = {
    "r": "rate_limit_exceeded",
    "t": "tokens_limit_exceeded",
    "c": "concurrency_limit_exceeded",
    "b": "budget_exceeded",
}


@dataclass(frozen=True)
class Rate:
    """State of a limit per minute after a call, for headers. `reset_ms`: until all of it is there again."""

    limit: int
    remaining: int
    reset_ms: int


@dataclass(frozen=True)
class Hold:
    """What one request has reserved. End it once, with `settle` or `void`; renew it while the request lives.

    `requests` and `tokens` are the limits per minute with the least left. `local`: admitted during an
    outage, so Redis does not know of it yet.
    """

    id: str
    tenant: str
    key_id: str
    demand: Demand
    checks: Sequence[Check]
    amounts: Sequence[int]
    price: Price | None
    requests: Rate | None = None
    tokens: Rate | None = None
    local: bool = False


@dataclass(frozen=True)
class QuotaRefusal:
    """Nothing was reserved. `retry_after_ms` is exact for rates and budgets, a guess for slots, None for
    never. `scope` says whose limit it is, such as "tenant"."""

    code: RefusalCode
    limit_name: LimitName
    scope: str
    limit: int
    retry_after_ms: int | None
    requests: Rate | None = None
    tokens: Rate | None = None


@dataclass(frozen=True)
class DayUsage:
    """Sums of one UTC day and model; `cached_tokens` are among the input, `price_nano` is in 1e-9."""

    day: date
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    price_nano: int


class QuotaStore:
    """Reserves, settles, voids and renews.

    Callers may be cancelled at any await and need no shield. A `reserve` that was cancelled or got no answer
    may have been applied all the same, so the store voids it in the background; a `settle` or `void` that
    was cut short is sent again until Redis confirms it (tenancy.owed).
    """

    def __init__(
        self,
        redis: Redis,
        prefix: str = PREFIX,
        *,
        prices: Mapping[str, Price] | None = None,
        lease_ms: int = LEASE_MS,
        probe_interval_s: float = 1.0,
        unconfirmed: Callable[[list[LedgerRow]], None] | None = None,
    ) -> None:
        """`unconfirmed` keeps the rows of settlements that were never confirmed, in a thread; else they are logged."""
        self.prices: Mapping[str, Price] = prices or {}
        self._prefix = prefix
        self._lease_us = lease_ms * 1000
        self._redis = GuardedRedis(redis, f"{prefix}:probe", probe_interval_s=probe_interval_s)
        self._reserve, self._settle, self._void, self._renew = (
            Script(name, "lib") for name in ("reserve", "settle", "void", "renew")
        )
        self._usage = Script("usage")
        self._outage = Outage()
        self._presence = Presence(self._redis, prefix)
        self._owed = OwedEndings(self._send_ending, unconfirmed)
        self._settled: set[str] = set()

    @property
    def healthy(self) -> bool:
        """False from the third failure in a row until a probe gets through again. Readiness should say the
        same."""
        return self._redis.healthy

    @property
    def guarded(self) -> GuardedRedis:
        """The same Redis behind the same breaker, for what else a gateway keeps there."""
        return self._redis

    @property
    def gateways(self) -> int | None:
        """How many gateways there were when Redis last told; None before it did."""
        return self._presence.count

    @property
    def admitted_in_outages(self) -> int:
        """Requests admitted without Redis, by the policies of their limits."""
        return self._outage.admitted

    @property
    def owed(self) -> int:
        """Endings that Redis has not confirmed yet."""
        return len(self._owed)

    def take_settled_tenants(self) -> set[str]:
        """Tenants with new ledger rows since the last call."""
        settled, self._settled = self._settled, set()
        return settled

    def put_settled_tenants(self, tenants: set[str]) -> None:
        """Give back what could not be told to anybody."""
        self._settled |= tenants

    def start(self) -> None:
        """Be counted among the gateways, which `local_share` needs. Call it on the loop; ends with
        `aclose`."""
        self._presence.start()

    async def reserve(
        self, tenant: Tenant, demand: Demand, *, key_id: str = "", key_limits: Limits | None = None
    ) -> Hold | QuotaRefusal:
        """Take what `demand` asks for from every limit that applies, or nothing at all.

        Where no limit applies, Redis is not asked. Redis is asked twice; if it stays silent, each limit's
        outage policy decides. Raises QuotaUnavailable, within the client's socket timeouts.
        """
        price = self.prices.get(demand.model)
        found = checks(applicable(tenant, demand.model, demand.service_class, key_id, key_limits))
        nano = estimate_price(demand, price)
        amounts = [check.reserve_amount(demand, nano) for check in found]
        if not found:
            return Hold(uuid.uuid4().hex, tenant.id, key_id, demand, (), (), price, local=True)
        for attempt in range(RESERVE_ATTEMPTS):
            hold = Hold(uuid.uuid4().hex, tenant.id, key_id, demand, found, amounts, price)
            try:
                return await self._try(hold)
            except QuotaUnavailable:
                logger.info("reservation %s: no answer to attempt %d", demand.request_id, attempt + 1)
        return self._admit_locally(hold)

    async def settle(self, hold: Hold, used: Used) -> None:
        """End a hold with what its request has used, and write its ledger row, once.

        Never raises QuotaUnavailable. Without effect on a hold that has ended.
        """
        price = 0
        if hold.price is not None:
            price = hold.price.nano(used.input_tokens, used.cached_tokens, used.output_tokens)
        fields = _row(hold, used, price)
        args: list[str | int] = [hold.id, _text(fields), DONE_MS, "new" if hold.local else ""]
        args += [hold.demand.model, used.input_tokens, used.cached_tokens, used.output_tokens, price]
        for check in hold.checks:
            args += [check.kind, check.field, check.amount(used, hold.demand.slots, price)]
        row = LedgerRow(hold.id, time.time_ns() // 1000, fields)
        await self._end(Ending(self._settle, hold.tenant, hold.id, args, row), hold)

    async def void(self, hold: Hold) -> None:
        """End a hold whose request was refused later on: every limit gets back what the hold still occupies.

        Never raises QuotaUnavailable. Without effect on a hold that has ended.
        """
        if hold.local:
            self._release(hold)
        else:
            await self._end(self._voiding(hold), hold)

    async def renew(self, live_holds: Iterable[Hold]) -> int:
        """Renew the leases of the requests in the caller's live table; every third of a lease is a good pace.

        A hold that lapsed while its request went on (a frozen Redis, one restarted empty) is taken again
        even above the limit, for the request does run: new ones are refused until the count is back below
        it. Returns how many holds that were. Raises QuotaUnavailable.
        """
        live = {hold.id: hold for hold in live_holds if hold.checks}
        by_tenant: dict[str, list[str | int]] = {}
        for hold in live.values():
            by_tenant.setdefault(hold.tenant, [self._lease_us]).append(hold.id)
        replies = await asyncio.gather(
            *(self._redis.run(self._renew, self._keys(tenant, "-"), ids) for tenant, ids in by_tenant.items())
        )
        gone = [live[id.decode()] for reply in replies for id in reply]
        # One that was settled in the meantime is marked as done, and is not taken again.
        taken = await asyncio.gather(*(self._take_again(hold) for hold in gone))
        return sum(taken)

    async def usage(self, tenant: str) -> list[DayUsage]:
        """What a tenant has used in the last two months, by day and model, up to the last settled request.
        Raises QuotaUnavailable."""
        key = self._keys(tenant, "-")[-1]
        reply: list[bytes] = await self._redis.run(self._usage, [key], [])
        found: dict[tuple[int, str], dict[str, int]] = {}
        for name, value in zip(reply[::2], reply[1::2], strict=True):
            day, separator, rest = name.decode().partition("|")
            model, _, what = rest.rpartition("|")
            if separator:
                found.setdefault((int(day), model), {})[what] = int(value)
        return [
            DayUsage(
                date.fromordinal(date(1970, 1, 1).toordinal() + day),
                model,
                *(sums.get(what, 0) for what in ("requests", "input", "cached", "output", "price")),
            )
            for (day, model), sums in sorted(found.items())
        ]

    async def sweep(self, tenant: str) -> None:
        """Drop the lapsed holds of a tenant that sends nothing itself. Raises QuotaUnavailable."""
        await self._redis.run(self._renew, self._keys(tenant, "-"), [self._lease_us])

    async def aclose(self) -> None:
        """Stop the background work. Holds that are still owed lapse with their leases."""
        await self._owed.aclose()
        await self._presence.aclose()
        await self._redis.aclose()

    async def _try(self, hold: Hold) -> Hold | QuotaRefusal:
        try:
            reply = await self._redis.run(
                self._reserve, self._keys(hold.tenant, hold.id), self._reserve_args(hold, "")
            )
        except (QuotaUnavailable, asyncio.CancelledError) as error:
            if not isinstance(error, QuotaUnavailable) or error.maybe_applied:
                self._owed.add(self._voiding(hold), maybe_made=True)
            raise
        status, refused, retry_us, *rates = reply
        if status == 2:
            raise QuotaUnavailable("the reservation was withdrawn before it was made", maybe_applied=False)
        requests, tokens = _rates(hold.checks, rates)
        if status == 0:
            return replace(hold, requests=requests, tokens=tokens)
        check = hold.checks[refused - 1]
        retry_ms = None if retry_us < 0 else _ceil_ms(retry_us)
        return QuotaRefusal(
            _CODES[check.kind], check.name, check.scope, check.limit, retry_ms, requests, tokens
        )

    async def _take_again(self, hold: Hold) -> bool:
        args = self._reserve_args(hold, "new" if hold.local else "again")
        reply = await self._redis.run(self._reserve, self._keys(hold.tenant, hold.id), args)
        return bool(reply[0] == 0)

    def _admit_locally(self, hold: Hold) -> Hold | QuotaRefusal:
        self._outage.gateways = self._presence.count
        refused = self._outage.admit(hold.tenant, hold.checks, hold.amounts)
        if refused is None:
            # Under an id of its own: the reservations that got no answer are withdrawn under theirs.
            return replace(hold, id=uuid.uuid4().hex, local=True)
        index, wait_s = refused
        check = hold.checks[index]
        if check.outage == "closed" or wait_s < 0:
            raise QuotaUnavailable("the quota store does not answer", maybe_applied=False)
        return QuotaRefusal(
            _CODES[check.kind], check.name, check.scope, check.limit, max(1, round(wait_s * 1000))
        )

    def _release(self, hold: Hold) -> None:
        if hold.local:
            self._outage.release(hold.tenant, hold.checks, hold.amounts)

    def _reserve_args(self, hold: Hold, mode: str) -> list[str | int]:
        args: list[str | int] = [hold.id, self._lease_us, _text(_row(hold, Used(outcome="lapsed"), 0)), mode]
        for check, amount in zip(hold.checks, hold.amounts, strict=True):
            args += [check.kind, check.field, amount, check.limit, check.burst, check.burst_span_us]
        return args

    def _voiding(self, hold: Hold) -> Ending:
        return Ending(self._void, hold.tenant, hold.id, [hold.id, DONE_MS])

    async def _end(self, ending: Ending, hold: Hold) -> None:
        if hold.id in self._owed:
            return
        self._release(hold)
        try:
            await self._send_ending(ending)
        except QuotaUnavailable as error:
            self._owed.add(ending, maybe_made=error.maybe_applied)
        except asyncio.CancelledError:
            self._owed.add(ending, maybe_made=True)
            raise

    async def _send_ending(self, ending: Ending) -> None:
        await self._redis.run(ending.script, self._keys(ending.tenant, ending.hold_id), ending.args)
        if ending.row is not None:
            self._settled.add(ending.tenant)

    def _keys(self, tenant: str, hold_id: str) -> list[str]:
        base = f"{self._prefix}:{{{tenant}}}:"
        return [
            f"{base}done:{hold_id}",
            *(base + name for name in ("leases", "holds", "windows", "counts", "ledger", "usage")),
        ]


def _row(hold: Hold, used: Used, price: int) -> dict[str, Any]:
    demand = hold.demand
    return {
        "request": demand.request_id,
        "tenant": hold.tenant,
        "key": hold.key_id,
        "model": demand.model,
        "class": demand.service_class,
        "outcome": used.outcome,
        "input_tokens": used.input_tokens,
        "cached_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        "price_nano": price,
        "timings": used.timings or {},
    }


def _text(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"))


def _rates(found: Sequence[Check], states: list[int]) -> tuple[Rate | None, Rate | None]:
    """Of limits on requests and on tokens, the one with the least left."""
    least: dict[str, Rate] = {}
    rated = [check for check in found if check.kind in ("r", "t")]
    for check, remaining, reset_us in zip(rated, states[::2], states[1::2], strict=True):
        rate = Rate(check.limit, remaining, _ceil_ms(reset_us))
        if check.kind not in least or rate.remaining < least[check.kind].remaining:
            least[check.kind] = rate
    return least.get("r"), least.get("t")


def _ceil_ms(us: int) -> int:
    return -(-us // 1000)
