"""Whose turn it is, and on which engine: the queue in front of the engines of one pool."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from policies.admission import Admission, Unattainable, has_deadline
from policies.engine_load import EngineLoad
from policies.grants import GrantInFlight, GrantsInFlight
from policies.head_of_line import choose_instead
from policies.output_length import OutputLengthPredictor
from policies.promises import Promise
from policies.queue_caps import QueueCaps
from policies.queue_order import BATCH_SHARE
from policies.queue_policies import QUEUE_POLICIES as QUEUE_POLICIES
from policies.queue_policies import QueuePolicy as QueuePolicy
from policies.queue_policies import make_order
from policies.reclaim import PoolShares, choose_reclaim, needs_reclaim
from policies.routing import choose_engine, ticket_cost
from policies.service import DEFAULT_PRICES, ServicePrices
from policies.service_accounts import QueueState, ServiceAccounts
from policies.tenant_account import QueuedTicket, TenantAccount
from policies.tickets import EngineReport, Grant, Refusal, Ticket
from policies.waiting_tenants import WaitingTenants

RETRY_AFTER_MS = 1000.0
"""Advice to a caller refused for a full queue."""

LOOK_BEHIND = 8
"""Tickets looked at when the first one fits nowhere."""


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

    Order: see `policies.queue_order` (VTC) and `policies.baseline_orders`. `served` is what engines report,
    `booked` what is granted and not served yet: input, cached input at its own price, predicted output.

    When the first ticket fits no engine. A tenant under its share of slots and pages gets in by reclaim
    (`policies.reclaim`). One over its share may be passed over. Otherwise it keeps its place and a start is
    reserved: passing it over would let small requests starve a large one. Others go before it only if they will
    have ended by then (`policies.head_of_line`). A tenant at its cap on KV pages (`kv_share` of its tickets) is
    passed over while another tenant waits.

    Invariants: a counter never falls; a push leads to one grant at most, and until then the ticket waits here
    unless it is withdrawn, replaced or expired; a waiting request has no grant in flight; booked >= 0.

    Every call is O(log n) in waiting tickets and tenants, and O(engines + what they run).
    """

    def __init__(
        self,
        *,
        queue_epoch: int,
        policy: QueuePolicy,
        max_queued_requests: int,
        max_queued_per_tenant: int,
        max_queued_tokens: int = 1 << 62,
        max_queued_tokens_per_tenant: int = 1 << 62,
        locality_window: float = 0.0,
        batch_share: float = BATCH_SHARE,
        prices: ServicePrices = DEFAULT_PRICES,
    ) -> None:
        """`locality_window` is in priced tokens per weight, `batch_share` in [0, 1). Raises ValueError."""
        if locality_window < 0 or not 0 <= batch_share < 1:
            raise ValueError("locality_window must not be negative, batch_share must be in [0, 1)")
        self.queue_epoch = queue_epoch
        self.policy = policy
        self._caps = QueueCaps(
            max_queued_requests, max_queued_per_tenant, max_queued_tokens, max_queued_tokens_per_tenant
        )
        self._prices = prices
        self._order = make_order(policy, self._cached_tokens, locality_window, batch_share)
        self._accounts = ServiceAccounts(self._touch)
        self._admission = Admission(prices)
        self.output_lengths = OutputLengthPredictor()
        """What tickets of a tenant are to be predicted with; whoever hears of the ends of requests tells it."""
        self._waiting = WaitingTenants()
        self._shares: PoolShares | None = None  # None: something has changed since
        self._entries: dict[str, QueuedTicket] = {}  # by request
        self._by_arrival: list[tuple[float, int, str]] = []  # may name entries that are gone
        self._queued_tokens = 0
        self._in_flight = GrantsInFlight()
        self._engines: dict[str, EngineLoad] = {}
        self._pushes = 0

    def __len__(self) -> int:
        """Number of waiting tickets."""
        return len(self._entries)

    def push(self, ticket: Ticket, now: float) -> Refusal | None:
        """Queue a ticket at the place its age gives it; a full queue refuses with code "queue_full".

        Idempotent: a ticket of the same request takes the place of one that waits. Whoever asks holds no
        grant, so a grant in flight for the request is taken back. An attempt lower than the one known is
        ignored.

        A deadline is promised (`policies.admission`), or the ticket is demoted to batch work if it allows that,
        or refused with code "deadline_unattainable". Baseline orders promise nothing and ignore deadlines.
        """
        if not 0 < ticket.weight < math.inf or ticket.sequences < 1 or not 0 < ticket.kv_share <= 1:
            raise ValueError(
                f"ticket {ticket.request}: weight and sequences must be positive and finite, kv_share in (0, 1]"
            )
        known = self._entries.get(ticket.request) or self._in_flight.get(ticket.request)
        if known is not None and ticket.attempt < known.ticket.attempt:
            return None
        self._settle(ticket.request)
        tenant = self._accounts.tenant(ticket.tenant)
        arrival = now - ticket.age_ms / 1000.0
        replaced = self._entries.get(ticket.request)
        if replaced is not None:
            arrival = min(arrival, replaced.arrival)
        else:
            full = self._caps.refuse(ticket, tenant, len(self._entries), self._queued_tokens)
            if full is not None:
                return Refusal(ticket.request, ticket.attempt, "queue_full", full, RETRY_AFTER_MS)
        promise = self._admission.promise(ticket.request)
        if promise is None and has_deadline(ticket) and self._order.entitles:
            verdict = self._judge(ticket, tenant, now)
            if isinstance(verdict, Promise):
                promise = verdict
            elif ticket.demotable:
                ticket = demote(ticket)
            else:
                if replaced is not None:
                    self._take_out(replaced)
                return _unattainable(ticket, verdict)
        if not tenant.queued:
            self._order.arrive(tenant, now)
        if not tenant.queued or (ticket.weight, ticket.kv_share) != (tenant.weight, tenant.kv_share):
            if tenant.queued:
                self._waiting.leave(tenant)
            tenant.weight, tenant.kv_share = ticket.weight, ticket.kv_share
            self._waiting.join(tenant)
            self._shares = None
        self._pushes += 1
        entry = QueuedTicket(
            self._order.rank(arrival, None if promise is None else promise.due),
            self._pushes,
            arrival,
            self._order.lane(ticket),
            ticket_cost(ticket, self._prices),
            ticket,
        )
        tenant.add(entry)
        self._queued_tokens += ticket.input_tokens
        self._entries[ticket.request] = entry
        if replaced is not None:
            self._remove(replaced)
        self._admission.arrive(ticket, tenant, entry.cost, now)
        if promise is not None:
            self._admission.give(promise)
        heapq.heappush(self._by_arrival, (arrival, self._pushes, ticket.request))
        self._touch(tenant)
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
        while self._by_arrival and self._by_arrival[0][0] <= latest_arrival:
            _, order, request = heapq.heappop(self._by_arrival)
            entry = self._entries.get(request)
            if entry is not None and entry.order == order:
                expired.append(entry.ticket)
                self._take_out(entry)
        return expired

    def break_promises(self, now: float) -> list[Refusal]:
        """Give up on promises that cannot be kept any more: the tickets are demoted, or taken out and refused with
        code "deadline_exceeded"."""
        refusals: list[Refusal] = []
        for request in self._admission.hopeless(now):
            entry = self._entries[request]
            self._take_out(entry)
            if entry.ticket.demotable:
                self.push(replace(demote(entry.ticket), age_ms=(now - entry.arrival) * 1e3), now)
            else:
                message = "the deadline was promised and cannot be kept any more"
                refusals.append(Refusal(request, entry.ticket.attempt, "deadline_exceeded", message))
        return refusals

    def next_grant(self, now: float) -> Grant | None:
        """Grant the next ticket to an engine that can take it; None if nobody can go now.

        Call until it answers None.
        """
        for request in self._in_flight.expired(now):
            self._settle(request)
        front = self._front(now, 1)
        if not front or not self._engines:
            return None
        entry = front[0]
        engine = choose_engine(entry.ticket, self._open_to(entry.ticket), self._prices)
        if engine is None and self._order.entitles:
            shares = self._pool_shares()
            engine = choose_reclaim(entry.ticket, shares)
            if engine is None:
                front = self._front(now, LOOK_BEHIND)
                instead = choose_instead(front, shares, self._prices, self._virtual_service)
                if instead is not None:
                    entry, engine = instead
        return None if engine is None else self._grant(entry, engine, now)

    def observe_report(self, report: EngineReport, now: float | None = None) -> None:
        """Count service and take the engine's state; a report older than one already seen is ignored.

        With `now`, predictions learn from the first tokens it tells of.
        """
        if self._accounts.is_old(report):
            return
        if self._accounts.is_new_epoch(report):
            self.forget_engine(report.engine)
        self._accounts.count_service(report)
        self._shares = None
        engine = self._engines.get(report.engine)
        before = {} if engine is None else engine.report.outstanding
        if engine is None:
            self._engines[report.engine] = EngineLoad(report)
        else:
            engine.update(report)
        self._accounts.update_outstanding(before, report.outstanding, self._engines.values())
        for request, attempt in report.accepted:
            grant = self._in_flight.get(request)
            if grant is not None and grant.engine == report.engine and grant.ticket.attempt == attempt:
                self._settle(request)
        if now is not None:
            for request, _ in report.first_tokens:
                self._admission.first_token(request, now)

    def forget_engine(self, name: str) -> None:
        """Grant no more to this engine until it reports again. What it has served stays counted."""
        engine = self._engines.get(name)
        if engine is None:
            return
        for request in self._in_flight.of_engine(name):
            self._settle(request)
        del self._engines[name]
        self._shares = None
        self._accounts.update_outstanding(engine.report.outstanding, {}, self._engines.values())

    def snapshot(self) -> dict[str, TenantSnapshot]:
        """Every tenant seen so far, for metrics."""
        return {
            name: TenantSnapshot(t.queued, t.weight, t.served, t.booked, t.key)
            for name, t in self._accounts.tenants.items()
        }

    def export_state(self) -> QueueState:
        """The counters, for a successor."""
        state = self._accounts.export(self.queue_epoch, self._order.last_to_leave)
        return replace(state, output_lengths=self.output_lengths.export())

    def restore(self, state: QueueState, now: float) -> None:
        """Go on from a predecessor's counters. Raises ValueError after the first ticket or report.

        Its engines' service since the state was taken counts with their next reports. Tenants that waited keep
        their places if they come back soon; others are lifted as ever.
        """
        self._accounts.restore(state, now)
        self.output_lengths.restore(state.output_lengths)
        self.queue_epoch = max(self.queue_epoch, state.queue_epoch)
        if state.last_to_leave is not None:
            self._order.last_to_leave = self._accounts.tenants.get(state.last_to_leave)

    # Placement --------------------------------------------------------------------------------------------------

    def _grant(self, entry: QueuedTicket, engine: EngineLoad, now: float) -> Grant:
        ticket, tenant = entry.ticket, self._accounts.tenants[entry.ticket.tenant]
        promise = self._admission.start(ticket.request)
        predicted = None if promise is None else promise.given_at + promise.upper_seconds - entry.arrival
        grant = Grant(
            request=ticket.request,
            attempt=ticket.attempt,
            queue_epoch=self.queue_epoch,
            engine=engine.report.engine,
            engine_epoch=engine.report.engine_epoch,
            queued_ms=(now - entry.arrival) * 1000.0,
            demoted=ticket.demoted,
            predicted_ttft_ms=None if predicted is None else predicted * 1e3,
        )
        cost = ticket_cost(ticket, self._prices, engine.cached_tokens(ticket))
        reclaims = needs_reclaim(ticket, engine)
        # Book before the grant goes out: the next decision must see it.
        self._take_out(entry)
        tenant.granted[ticket.request] = cost
        self._in_flight.add(
            GrantInFlight(ticket, grant.engine, cost, now + grant.time_to_live_ms / 1000.0, reclaims)
        )
        engine.add_grant(ticket, cost, reclaims)
        self._shares = None
        self._order.charge(tenant, entry, cost, now)
        self._touch(tenant)
        return grant

    def _front(self, now: float, count: int) -> list[QueuedTicket]:
        """The next tickets in order, without those of tenants that they would lift over their caps everywhere."""
        asked = count
        while True:
            front = self._order.front(now, asked)
            allowed = [entry for entry in front if self._open_to(entry.ticket)]
            if len(allowed) == len(front) or len(allowed) >= count or len(front) < asked or not self._engines:
                return allowed[:count]
            asked *= 2

    def _open_to(self, ticket: Ticket) -> Iterable[EngineLoad]:
        """The engines where the ticket's tenant stays within its cap."""
        if ticket.kv_share >= 1.0 or not self._order.entitles:
            return self._engines.values()
        return self._pool_shares().open_to(ticket)

    def _judge(self, ticket: Ticket, tenant: TenantAccount, now: float) -> Promise | Unattainable:
        cost = ticket_cost(ticket, self._prices)
        return self._admission.judge(
            ticket, tenant, self._order.lane(ticket), cost, self._engines.values(), now
        )

    def _pool_shares(self) -> PoolShares:
        if self._shares is None:
            live = {name for engine in self._engines.values() for name in engine.tenants()}
            others = [account for account in map(self._accounts.tenant, live) if not account.queued]
            self._shares = PoolShares(
                self._engines.values(),
                self._accounts.tenant,
                total_weight=self._waiting.weight + sum(account.weight for account in others),
                total_kv_share=self._waiting.kv_share + sum(account.kv_share for account in others),
                caps_bind=self._waiting.count > 1,
            )
        return self._shares

    def _virtual_service(self, entry: QueuedTicket) -> float:
        return self._accounts.tenants[entry.ticket.tenant].key

    def _cached_tokens(self, ticket: Ticket) -> int:
        return max((engine.cached_tokens(ticket) for engine in self._engines.values()), default=0)

    # Bookkeeping ------------------------------------------------------------------------------------------------

    def _take_out(self, entry: QueuedTicket) -> None:
        del self._entries[entry.ticket.request]
        self._admission.drop(entry.ticket.request)
        self._remove(entry)

    def _remove(self, entry: QueuedTicket) -> None:
        ticket, tenant = entry.ticket, self._accounts.tenants[entry.ticket.tenant]
        tenant.remove(entry)
        self._queued_tokens -= ticket.input_tokens
        if not tenant.queued:
            self._waiting.leave(tenant)
            self._shares = None
            self._order.leave(tenant)
        if not self._entries:
            self._by_arrival.clear()
        self._touch(tenant)

    def _settle(self, request: str) -> None:
        """The grant of a request, if one is in flight, no longer counts."""
        grant = self._in_flight.pop(request)
        if grant is None:
            return
        self._shares = None
        self._engines[grant.engine].remove_grant(grant.ticket, grant.cost, grant.reclaims)
        tenant = self._accounts.tenants[grant.ticket.tenant]
        del tenant.granted[request]
        self._touch(tenant)

    def _touch(self, tenant: TenantAccount) -> None:
        self._order.touch(tenant)
        self._admission.touch(tenant)


def demote(ticket: Ticket) -> Ticket:
    """The ticket as batch work without a deadline."""
    return replace(
        ticket, service_class="batch", remaining_ttft_ms=None, remaining_deadline_ms=None, demoted=True
    )


def _unattainable(ticket: Ticket, verdict: Unattainable) -> Refusal:
    asked = ticket.remaining_deadline_ms if ticket.remaining_ttft_ms is None else ticket.remaining_ttft_ms
    earliest = retry = None
    if verdict.missing_seconds is not None and asked is not None:
        earliest = ticket.age_ms + asked + verdict.missing_seconds * 1e3
    if verdict.retry_seconds is not None:
        retry = verdict.retry_seconds * 1e3
    message = f"the deadline cannot be promised: {verdict.why}"
    return Refusal(ticket.request, ticket.attempt, "deadline_unattainable", message, retry, earliest)
