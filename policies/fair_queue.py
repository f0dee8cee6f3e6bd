"""Whose turn it is: the weighted virtual token counter (VTC) over the engines of one pool.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24), with weights, with predicted output
charged on grant and given back as service arrives, and with both branches of the lift.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from policies.engine_load import EngineLoad
from policies.reclaim import choose_reclaim, needs_reclaim
from policies.service import DEFAULT_PRICES, ServicePrices
from policies.tickets import EngineReport, Grant, Refusal, Ticket

QueuePolicy = Literal["vtc", "fcfs"]

RETRY_AFTER_MS = 1000.0
"""Advice to a caller refused for a full queue."""


class _Entry(NamedTuple):
    """A waiting ticket. Sorts by arrival; `order` is unique, so that tickets are never compared."""

    arrival: float
    order: int
    ticket: Ticket


class _InFlight(NamedTuple):
    """A grant that no report has confirmed yet."""

    ticket: Ticket
    engine: str
    cost: float
    expires_at: float
    reclaims: bool


@dataclass
class _Tenant:
    weight: float = 1.0
    queue: list[_Entry] = field(default_factory=list)
    served: float = 0.0
    # Service divided by the weight of its time, plus every lift: a new weight does not rewrite the past.
    counter: float = 0.0
    outstanding: float = 0.0
    granted: dict[str, float] = field(default_factory=dict)
    key: float = 0.0

    @property
    def booked(self) -> float:
        return self.outstanding + sum(self.granted.values())

    def update_key(self) -> None:
        self.key = self.counter + self.booked / self.weight


@dataclass
class _Seen:
    """How far the service of an engine has been counted."""

    engine_epoch: int
    step: int
    served: dict[str, float]


@dataclass(frozen=True)
class TenantSnapshot:
    """One tenant for metrics. Service is in priced tokens; the smallest `key` goes next."""

    queued: int
    weight: float
    served: float
    booked: float
    key: float


class FairQueue:
    """The single scheduling authority of an engine pool: tickets and reports in, grants out.

    `now` is a monotonic clock reading in seconds, always of the same clock. Not thread safe.
    `queue_epoch` is stamped on every grant; its owner may raise it.

    Order. The tenant with the smallest key (served + booked) / weight goes next, its oldest ticket first.
    `served` is what engines report; `booked` is granted and not served yet. If the head fits no engine,
    nobody is granted: passing it over would let small requests starve a large one. Policy "fcfs" takes the
    oldest ticket of all and keeps every other rule.

    Lift. A tenant whose queue was empty gets its counter raised, when it returns, to the smallest counter
    among the waiting tenants, or, when nobody waits, to the counter of the tenant that left the queue last.
    So idle time earns no credit. The lift compares service without `booked`: it grants a returning tenant as
    much in flight as the others have, and no more.

    Caps. At most `max_queued_per_tenant` tickets of one tenant wait, `max_queued_requests` in all, and no
    tenant holds more than the places still free in all (dynamic thresholds, Choudhury and Hahne, 1998). So
    the flood of one tenant stops at half of the total, n floods leave one part in n + 1 free, and nobody is
    shut out.

    Invariants: a counter never falls; a push leads to one grant at most, and until then the ticket waits here
    unless it is withdrawn, replaced or expired; a waiting request has no grant in flight; booked >= 0.
    """

    def __init__(
        self,
        *,
        queue_epoch: int,
        policy: QueuePolicy,
        max_queued_requests: int,
        max_queued_per_tenant: int,
        prices: ServicePrices = DEFAULT_PRICES,
    ) -> None:
        if policy not in ("vtc", "fcfs"):
            raise ValueError(f"unknown queue policy {policy!r}, allowed: vtc, fcfs")
        if max_queued_requests < 1 or max_queued_per_tenant < 1:
            raise ValueError("queue caps must be at least 1")
        self.queue_epoch = queue_epoch
        self.policy = policy
        self.max_queued_requests = max_queued_requests
        self.max_queued_per_tenant = max_queued_per_tenant
        self._prices = prices
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, _Tenant] = {}  # the tenants with a queue, and only those
        self._entries: dict[str, _Entry] = {}  # by request
        self._in_flight: dict[str, _InFlight] = {}  # by request, oldest grant first
        self._engines: dict[str, EngineLoad] = {}
        self._seen: dict[
            str, _Seen
        ] = {}  # kept for forgotten engines too: one that returns is not counted twice
        self._last_to_leave: _Tenant | None = None
        self._pushes = 0

    def __len__(self) -> int:
        """Number of waiting tickets."""
        return len(self._entries)

    def push(self, ticket: Ticket, now: float) -> Refusal | None:
        """Queue a ticket at the place its age gives it; a full queue refuses with code "queue_full".

        Idempotent: a ticket of the same request takes the place of one that waits. Whoever asks holds no
        grant, so a grant in flight for the request is taken back. An attempt lower than the one known is
        ignored.
        """
        if ticket.weight <= 0 or ticket.sequences < 1:
            raise ValueError(f"ticket {ticket.request}: weight and sequences must be positive")
        known = self._entries.get(ticket.request) or self._in_flight.get(ticket.request)
        if known is not None and ticket.attempt < known.ticket.attempt:
            return None
        self._settle(ticket.request)
        tenant = self._tenant(ticket.tenant)
        arrival = now - ticket.age_ms / 1000.0
        replaced = self._entries.pop(ticket.request, None)
        if replaced is not None:
            arrival = min(arrival, replaced.arrival)
            self._remove(replaced)
        elif (full := self._is_full(tenant)) is not None:
            return Refusal(ticket.request, ticket.attempt, "queue_full", full, RETRY_AFTER_MS)
        if ticket.tenant not in self._waiting:
            self._lift(tenant)
            self._waiting[ticket.tenant] = tenant
        tenant.weight = ticket.weight
        tenant.update_key()
        self._pushes += 1
        entry = _Entry(arrival, self._pushes, ticket)
        insort(tenant.queue, entry)
        self._entries[ticket.request] = entry
        if replaced is not None:
            self._leave_if_empty(replaced.ticket.tenant)
        return None

    def withdraw(self, request: str, attempt: int) -> bool:
        """Drop a ticket, or its unconfirmed grant, up to this attempt. False when there was none."""
        known = self._entries.get(request) or self._in_flight.get(request)
        if known is None or known.ticket.attempt > attempt:
            return False
        if request in self._entries:
            self._take_out(self._entries[request])
        self._settle(request)
        return True

    def expire(self, now: float, waiting_timeout_ms: float) -> list[Ticket]:
        """Take out the tickets that have waited this long or longer, the age they came with included."""
        latest_arrival = now - waiting_timeout_ms / 1000.0
        expired: list[Ticket] = []
        for tenant in list(self._waiting.values()):
            while tenant.queue and tenant.queue[0].arrival <= latest_arrival:
                expired.append(tenant.queue[0].ticket)
                self._take_out(tenant.queue[0])
        return expired

    def next_grant(self, now: float) -> Grant | None:
        """Grant the next ticket to the least loaded engine that can take it; None if there is no such pair.

        Call until it answers None. O(tenants waiting + engines).
        """
        self._expire_grants(now)
        if not self._waiting:
            return None
        if self.policy == "vtc":
            tenant = min(self._waiting.values(), key=lambda t: t.key)
        else:
            tenant = min(self._waiting.values(), key=lambda t: t.queue[0])
        entry = tenant.queue[0]
        ticket = entry.ticket
        engine = self._choose_engine(ticket)
        if engine is None:
            return None
        name = engine.report.engine
        reclaims = needs_reclaim(ticket, engine)
        grant = Grant(
            request=ticket.request,
            attempt=ticket.attempt,
            queue_epoch=self.queue_epoch,
            engine=name,
            engine_epoch=engine.report.engine_epoch,
            queued_ms=(now - entry.arrival) * 1000.0,
        )
        cost = self._prices.cost(computed_input=ticket.input_tokens, output=ticket.predicted_output_tokens)
        # Book before the grant goes out: the next decision must see it.
        self._take_out(entry)
        expires_at = now + grant.time_to_live_ms / 1000.0
        self._in_flight[ticket.request] = _InFlight(ticket, name, cost, expires_at, reclaims)
        engine.add_grant(ticket, cost, reclaims)
        tenant.granted[ticket.request] = cost
        tenant.update_key()
        return grant

    def observe_report(self, report: EngineReport) -> None:
        """Count service and take the engine's state; a report older than one already seen is ignored.

        The service of an engine in its first report to this queue was granted by somebody else, under lifts
        that are not known here. It is part of `served` and moves nobody in the order.
        """
        seen = self._seen.get(report.engine)
        if seen is not None and (report.engine_epoch, report.step) < (seen.engine_epoch, seen.step):
            return
        if seen is None or seen.engine_epoch != report.engine_epoch:
            self.forget_engine(report.engine)
            counted: dict[str, float] = {}
        else:
            counted = seen.served
        for name, total in report.served.items():
            delta = total - counted.get(name, 0.0)
            if delta > 0:
                counted[name] = total
                tenant = self._tenant(name)
                tenant.served += delta
                if seen is not None:
                    tenant.counter += delta / tenant.weight
                    tenant.update_key()
        self._seen[report.engine] = _Seen(report.engine_epoch, report.step, counted)
        engine = self._engines.get(report.engine)
        before = {} if engine is None else engine.report.outstanding
        if engine is None:
            self._engines[report.engine] = EngineLoad(report)
        else:
            engine.update(report)
        self._update_outstanding(before, report.outstanding)
        for request, attempt in report.accepted:
            grant = self._in_flight.get(request)
            if grant is not None and grant.engine == report.engine and grant.ticket.attempt == attempt:
                self._settle(request)

    def forget_engine(self, name: str) -> None:
        """Grant no more to this engine until it reports again. What it has served stays counted."""
        engine = self._engines.get(name)
        if engine is None:
            return
        for request in [r for r, grant in self._in_flight.items() if grant.engine == name]:
            self._settle(request)
        del self._engines[name]
        self._update_outstanding(engine.report.outstanding, {})

    def snapshot(self) -> dict[str, TenantSnapshot]:
        """Every tenant seen so far, for metrics."""
        return {
            name: TenantSnapshot(len(t.queue), t.weight, t.served, t.booked, t.key)
            for name, t in self._tenants.items()
        }

    def _tenant(self, name: str) -> _Tenant:
        return self._tenants.setdefault(name, _Tenant())

    def _is_full(self, tenant: _Tenant) -> str | None:
        queued = len(tenant.queue)
        if queued >= self.max_queued_per_tenant:
            return f"{queued} requests of this tenant are waiting (max_queued_per_tenant)"
        if queued >= self.max_queued_requests - len(self._entries):
            return f"{len(self._entries)} requests are waiting, {queued} of this tenant (max_queued_requests)"
        return None

    def _choose_engine(self, ticket: Ticket) -> EngineLoad | None:
        fitting = [engine for engine in self._engines.values() if engine.fits(ticket)]
        if fitting:
            return min(fitting, key=lambda engine: engine.work)
        if self.policy == "fcfs":
            return None
        active = set(self._waiting).union(*(engine.tenants() for engine in self._engines.values()))
        weights = {name: self._tenant(name).weight for name in active}
        total = sum(weights.values())
        return choose_reclaim(ticket, self._engines.values(), lambda name: weights[name] / total)

    def _lift(self, tenant: _Tenant) -> None:
        if self._waiting:
            floor = min(other.counter for other in self._waiting.values())
        elif self._last_to_leave is not None:
            floor = self._last_to_leave.counter
        else:
            return
        tenant.counter = max(tenant.counter, floor)

    def _remove(self, entry: _Entry) -> None:
        queue = self._tenants[entry.ticket.tenant].queue
        del queue[bisect_left(queue, entry)]

    def _leave_if_empty(self, name: str) -> None:
        if not self._tenants[name].queue:
            self._last_to_leave = self._waiting.pop(name)

    def _take_out(self, entry: _Entry) -> None:
        del self._entries[entry.ticket.request]
        self._remove(entry)
        self._leave_if_empty(entry.ticket.tenant)

    def _settle(self, request: str) -> None:
        """The grant of a request, if one is in flight, no longer counts."""
        grant = self._in_flight.pop(request, None)
        if grant is None:
            return
        self._engines[grant.engine].remove_grant(grant.ticket, grant.cost, grant.reclaims)
        tenant = self._tenants[grant.ticket.tenant]
        del tenant.granted[request]
        tenant.update_key()

    def _expire_grants(self, now: float) -> None:
        while self._in_flight:
            request, grant = next(iter(self._in_flight.items()))
            if grant.expires_at > now:
                return
            self._settle(request)

    def _update_outstanding(self, before: dict[str, float], after: dict[str, float]) -> None:
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                tenant = self._tenant(name)
                # Summed afresh: differences would drift. An engine's rounding must not turn into credit.
                tenant.outstanding = sum(
                    max(0.0, engine.report.outstanding.get(name, 0.0)) for engine in self._engines.values()
                )
                tenant.update_key()
