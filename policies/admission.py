"""Whether a deadline can be promised: a walk over the order that the queue will really serve.

As in SLOs-Serve (arXiv 2504.08784) a newcomer must be feasible itself and leave every promise feasible that was so
before. The order is the fair queue's own (class, virtual service, earliest deadline inside a tenant), and what a tenant
is promised rests on its own share: the other active tenants are taken to use all of theirs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.engine_load import EngineLoad
from policies.latency_model import QuantileTracker
from policies.pool_speed import RequestMix, engine_start, first_token_seconds, pool_speed
from policies.promises import Promise, PromiseTable
from policies.queue_order import BATCH_SHARE
from policies.service import ServicePrices
from policies.tenant_account import TenantAccount
from policies.tickets import Ticket
from policies.virtual_time import Floats, Fluid, Mask, VirtualTime, key_shift

PROMISE_LEVEL = 0.97
"""Share of the promises that is aimed at. The error margin is corrected after each, so that 95 % hold in bad times."""

LONG_CONTEXT_STEPS = 16
LONG_CONTEXT_MARGIN = 2.0
"""A prompt of this many whole steps needs twice the margin, and counts on nobody being preempted for it."""

_LEVELS = {"interactive": 0, "default": 1, "batch": 2}
_RATES = (1.0, 1.0, BATCH_SHARE)
_UNIT_SECONDS = 0.02  # errors count relative to the prediction plus this: what the way there and back takes
_ROUNDING_SECONDS = 0.005  # whoever asks again rounds up, and must not lose the place by it
_FORGET_SECONDS = 600.0


@dataclass(frozen=True)
class Unattainable:
    """No promise, and why. A deadline `missing_seconds` later could be promised; None: none could be now.

    After `retry_seconds` the same deadline may be attainable.
    """

    why: str
    missing_seconds: float | None = None
    retry_seconds: float | None = None


def has_deadline(ticket: Ticket) -> bool:
    """Whether the ticket asks for a promise."""
    return ticket.remaining_ttft_ms is not None or ticket.remaining_deadline_ms is not None


class Admission:
    """Promises of one pool. Not thread-safe; the fair queue tells it of every change.

    `judge` decides and changes nothing, `give` makes the promise. A promise lives until the ticket leaves the queue:
    by `drop`, or by `start`, after which `first_token` teaches how good the prediction was.
    """

    def __init__(self, prices: ServicePrices) -> None:
        self._prices = prices
        self._time = VirtualTime()
        self._table = PromiseTable()
        self._started: dict[str, Promise] = {}
        self._changed: dict[TenantAccount, None] = {}
        self._mix = RequestMix()
        self._errors = [QuantileTracker(PROMISE_LEVEL, start=1.0, lowest=0.0, highest=20.0) for _ in _LEVELS]

    def __len__(self) -> int:
        """Promises to tickets that wait."""
        return len(self._table)

    @property
    def margins(self) -> tuple[float, ...]:
        """Error, relative to the prediction, that first tokens of each class hardly exceed; interactive first."""
        return tuple(error.value for error in self._errors)

    # What the queue tells ---------------------------------------------------------------------------------------

    def arrive(self, ticket: Ticket, tenant: TenantAccount, cost: float, now: float) -> None:
        """A ticket of so much priced work is queued."""
        self._mix.observe(ticket)
        interactive = ticket.service_class == "interactive"
        self._time.saw_ticket(tenant.number, now, cost=cost, interactive=interactive)

    def touch(self, tenant: TenantAccount) -> None:
        """The tenant's service, bookings, weight or waiting tickets have changed."""
        self._changed[tenant] = None  # many changes between two walks cost one update

    def give(self, promise: Promise) -> None:
        """Make a promise that `judge` found to hold."""
        self._table.start[self._behind(promise.tenant, promise.level, promise.due)] += promise.virtual_cost
        self._table.add(promise)

    def promise(self, request: str) -> Promise | None:
        """What a waiting ticket was promised."""
        return self._table.get(request)

    def drop(self, request: str) -> None:
        """The ticket has left the queue without a grant."""
        self._table.pop(request)

    def start(self, request: str) -> Promise | None:
        """The ticket is granted. Its promise, if it has one."""
        promise = self._table.pop(request)
        if promise is not None:
            self._started[request] = promise
        return promise

    def first_token(self, request: str, now: float) -> None:
        """The first token of a granted request came: learn from how far off the prediction was."""
        promise = self._started.pop(request, None)
        if promise is not None:
            self._learn(promise, now)

    def hopeless(self, now: float) -> list[str]:
        """Waiting requests that cannot be in time any more; their promises are gone. Forgets granted ones that nobody
        heard of again."""
        while self._started:
            request, promise = next(iter(self._started.items()))
            if promise.given_at > now - _FORGET_SECONDS:
                break
            del self._started[request]
        late: Mask = now + self._table.prefill_seconds > self._table.due
        requests = self._table.requests(late) if late.any() else []
        for request in requests:
            missed = self._table.pop(request)
            if missed is not None:
                self._learn(missed, now + missed.prefill_seconds)
        return requests

    def _learn(self, promise: Promise, first_token_at: float) -> None:
        late = first_token_at - promise.given_at - promise.expected_seconds
        self._errors[promise.level].observe(late / (promise.expected_seconds + _UNIT_SECONDS))

    # The walk ---------------------------------------------------------------------------------------------------

    def judge(
        self,
        ticket: Ticket,
        tenant: TenantAccount,
        lane: str,
        cost: float,
        engines: Iterable[EngineLoad],
        now: float,
    ) -> Promise | Unattainable:
        """Whether the ticket's deadline can be promised. `cost` is its priced work, `lane` where it would wait."""
        self._update()
        speeds = pool_speed(engines, self._mix, self._prices)
        if not speeds:
            return Unattainable("no engine has told its speed yet")
        room = max(speed.load.report.total_pages * speed.load.report.page_size for speed in speeds)
        if (tokens := ticket.input_tokens + ticket.predicted_output_tokens) > room:
            return Unattainable(f"{tokens} tokens do not fit the KV cache of {room}")

        level = _LEVELS[lane]
        rate = _RATES[level] * sum(speed.service_per_second for speed in speeds)
        due = now + first_token_seconds(ticket, speeds)
        key = tenant.key if tenant.queued else max(tenant.key, self._time.counter_floor())
        long_context = any(
            ticket.input_tokens >= LONG_CONTEXT_STEPS * s.load.report.max_num_batched_tokens for s in speeds
        )
        margin = LONG_CONTEXT_MARGIN if long_context else 1.0
        others = self._time.fluid(now, level, without=tenant.number)
        share = ticket.weight / (ticket.weight + others.total_weight)
        # Others that are behind catch up first, with what they have; from then on everybody gets all of their share.
        catch_up = others.likely_until(key, rate) / rate
        before_key = others.service_until(np.array([key]))

        def turn_seconds(ahead: Floats) -> Floats:
            """Until its turn, with so much work of its own tenant before it."""
            service = others.service_until(key + ahead / ticket.weight) - before_key + ahead
            seconds: Floats = catch_up + service / rate
            return seconds

        queue = tenant.lanes.get(lane, [])
        position = bisect_right(queue, due, key=lambda entry: entry.rank)
        earlier = sum(entry.cost for entry in tenant.lanes.get("interactive", ())) if level == 1 else 0.0
        ahead = earlier + sum(entry.cost for entry in queue[:position])
        turn = float(turn_seconds(np.array([ahead]))[0])
        start = engine_start(
            ticket, speeds, others, share=share, ahead=turn * rate, reclaims=not long_context
        )
        seconds = float(self._upper(max(turn, start.gap) + start.prefill, level, margin))
        broken = self._breaks(tenant, ticket.weight, level, due, cost, key, rate / _RATES[level], others, now)
        if now + seconds <= due and broken is None:
            virtual_time = key + ahead / ticket.weight
            waits = (others.likely_until(virtual_time, rate) + ahead) / rate
            return Promise(
                request=ticket.request,
                tenant=tenant.number,
                level=level,
                due=due,
                start=virtual_time,
                engine_seconds=start.prefill,
                prefill_seconds=start.least,
                margin=margin,
                given_at=now,
                catch_up_seconds=catch_up,
                virtual_cost=cost / ticket.weight,
                expected_seconds=max(waits, start.gap) + start.prefill,
                upper_seconds=seconds,
            )
        if broken is not None and not self._time.is_active(tenant.number, now):
            # Whatever its deadline, one more tenant makes the shares of the others smaller.
            return Unattainable("earlier promises would break", None, broken - now)
        # The first place in the tenant's queue where a later deadline is met that keeps it at this very place.
        ranks = np.array([0.0, *(entry.rank - now for entry in queue)])
        later = np.maximum(ranks, due - now if broken is None else max(due, broken) - now)
        turns = turn_seconds(np.cumsum([earlier, *(entry.cost for entry in queue)]))
        start = engine_start(
            ticket, speeds, others, share=share, ahead=float(turns[-1]) * rate, reclaims=not long_context
        )
        upper = self._upper(np.maximum(turns, start.gap) + start.prefill, level, margin)
        reachable = np.maximum(upper, later)
        keeps_place = reachable + _ROUNDING_SECONDS < np.append(ranks[1:], np.inf)
        why = "its turn would come too late" if now + seconds > due else "earlier promises would break"
        missing = max(0.0, now + float(reachable[keeps_place].min()) - due)
        return Unattainable(why, missing, missing)

    def _breaks(
        self,
        tenant: TenantAccount,
        weight: float,
        level: int,
        due: float,
        cost: float,
        key: float,
        pool_rate: float,
        others: Fluid,
        now: float,
    ) -> float | None:
        """The latest due time of the promises that a newcomer would break, None if there is none.

        It goes before its tenant's promises of lower classes and later deadlines, and one of a tenant that was not
        active makes everybody's share smaller. Promises that have slipped already bind nobody.
        """
        table = self._table
        joins = not self._time.is_active(tenant.number, now)
        delayed = np.ones(len(table), np.bool_) if joins else self._behind(tenant.number, level, due)
        if not delayed.any():
            return None
        if not joins:
            self._refresh_starts(tenant, level, key)
        latest: float | None = None
        for other_level in np.unique(table.level[delayed]).tolist():
            rows = delayed & (table.level == other_level)
            rate = pool_rate * _RATES[other_level]
            fluid = others
            if joins or other_level != level:
                fluid = self._time.fluid(now, other_level, without=tenant.number)
            before = self._service_before(rows, other_level, 0.0, now, fluid, own=not joins)
            if joins:
                keys = self._time.keys(table.tenant[rows])
                own_key = key + key_shift(other_level, interactive=level == 0)
                after = before + weight * np.maximum(table.start[rows] - np.maximum(keys, own_key), 0.0)
            else:
                later = cost / weight
                after = self._service_before(rows, other_level, later, now, fluid, own=True)
            broken = self._kept(rows, other_level, before / rate, now) & ~self._kept(
                rows, other_level, after / rate, now
            )
            if broken.any():
                latest = max(latest or 0.0, float(table.due[rows][broken].max()))
        return latest

    def _refresh_starts(self, tenant: TenantAccount, level: int, key: float) -> None:
        """Virtual starts of a tenant's promises of this class and those below, by what really stands before them."""
        table, ahead = self._table, 0.0
        for lane, lane_level in _LEVELS.items():
            queue = tenant.lanes.get(lane, ())
            costs = np.cumsum([ahead, *(entry.cost for entry in queue)])
            rows = (table.tenant == tenant.number) & (table.level == lane_level)
            if lane_level >= level and rows.any():
                # Of equal ranks each is taken to be the last.
                position = np.searchsorted([entry.rank for entry in queue], table.due[rows], side="right")
                table.start[rows] = key + costs[position - 1] / tenant.weight
            ahead = float(costs[-1])

    def _service_before(
        self, rows: Mask, level: int, later: float, now: float, fluid: Fluid, *, own: bool
    ) -> Floats:
        """Work before the turns of promises of one class, their virtual starts `later`: float64 [n]. `own`: they are
        all of the tenant that `fluid` leaves out."""
        tenants = self._table.tenant[rows]
        start = self._table.start[rows] + later
        keys = np.minimum(self._time.keys(tenants), start)
        service = fluid.service_until(start) - fluid.service_until(keys)
        if not own:
            service -= self._time.own_service(tenants, start, level, now)
            service += self._time.own_service(tenants, keys, level, now)
        work: Floats = np.maximum(service, 0.0) + self._time.weights(tenants) * (start - keys)
        return work

    def _kept(self, rows: Mask, level: int, turn: Floats, now: float) -> Mask:
        """Which promises in `rows` are kept if their turns come `turn` seconds after the others have caught up."""
        table = self._table
        catch_up = np.maximum(table.catch_up_seconds[rows] - (now - table.given_at[rows]), 0.0)
        upper = self._upper(catch_up + turn + table.engine_seconds[rows], level, table.margin[rows])
        in_time: Mask = now + upper <= table.due[rows]
        return in_time

    def _behind(self, tenant: int, level: int, due: float) -> Mask:
        """The tenant's promises that go after a ticket of this class and due time."""
        table = self._table
        later = (table.level > level) | ((table.level == level) & (table.due > due))
        behind: Mask = (table.tenant == tenant) & later
        return behind

    def _update(self) -> None:
        if not self._changed:
            return
        tenants, self._changed = list(self._changed), {}
        per_token, per_request = self._prices.computed_input, self._prices.output * self._mix.output_tokens
        self._time.set(
            [tenant.number for tenant in tenants],
            keys=[tenant.key for tenant in tenants],
            counters=[tenant.counter for tenant in tenants],
            weights=[tenant.weight for tenant in tenants],
            backlogs=[per_token * t.queued_tokens + per_request * t.queued for t in tenants],
        )

    def _upper(self, seconds: Any, level: int, margin: Any) -> Any:
        """A time, float or float64 [n], with its error margin."""
        return seconds + margin * self._errors[level].value * (seconds + _UNIT_SECONDS)
