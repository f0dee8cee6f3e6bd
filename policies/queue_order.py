"""The order of a fair queue: whose ticket goes next. The interface, and the weighted virtual token counter (VTC).

Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24), with weights, with predicted output charged on
grant and given back as service arrives, and with both branches of the lift.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice

from policies.lazy_heap import LazyHeap
from policies.tenant_account import MAIN_LANE, QueuedTicket, TenantAccount
from policies.tickets import Ticket

CachedTokens = Callable[[Ticket], int]
"""Input tokens of a ticket that some engine has in its prefix cache."""

INTERACTIVE_LEAD = 4096.0
BATCH_SHARE = 0.1

NO_DEADLINE_SECONDS = 60.0
"""Where a ticket without a deadline stands among those of its tenant that have one: it never waits for ever."""

LOCALITY_CANDIDATES = 16
LOCALITY_LOOKAHEAD = 4
LOCALITY_SECONDS = 2.0
"""Tenants and tickets of each looked at for a cached prefix, and how much earlier than its turn one may go."""


class QueueOrder(ABC):
    """Order of the waiting tickets. The fair queue calls it with every change; it owns no ticket.

    `entitles`: tenants under their share of slots and pages have rights (reclaim, passing over, backfill).
    Without, the order is strict: if its first ticket fits no engine, nobody goes.
    """

    entitles = False
    last_to_leave: TenantAccount | None = None
    """Whose counter a tenant is lifted to that comes back when nobody waits."""

    def lane(self, ticket: Ticket) -> str:
        """Which of a tenant's queues the ticket waits in."""
        return MAIN_LANE

    def rank(self, ticket: Ticket, arrival: float, now: float) -> float:
        """The ticket's place in its lane, smallest first."""
        return arrival

    @abstractmethod
    def arrive(self, tenant: TenantAccount, now: float) -> None:
        """A tenant of which nothing waited is about to wait."""

    @abstractmethod
    def leave(self, tenant: TenantAccount) -> None:
        """Nothing of the tenant waits any more."""

    @abstractmethod
    def touch(self, tenant: TenantAccount) -> None:
        """The tenant's service, bookings, weight or waiting tickets have changed."""

    @abstractmethod
    def charge(self, tenant: TenantAccount, entry: QueuedTicket, cost: float, now: float) -> None:
        """A ticket of the tenant has been granted at this cost. `touch` follows."""

    @abstractmethod
    def front(self, now: float, count: int) -> list[QueuedTicket]:
        """The next tickets in order, at most one per tenant and lane; [0] is the one whose turn it is."""


class VtcOrder(QueueOrder):
    """The tenant with the least virtual service, (served + booked) / weight, goes first.

    Lift. A tenant of which nothing waited gets its counter raised, when it returns, to the smallest counter among
    the waiting tenants, or, when nobody waits, to the counter of the tenant that left the queue last. So idle
    time earns no credit. The lift compares service without `booked`: it grants a returning tenant as much in
    flight as the others have, and no more. With `lift` False this is the least-counter-first baseline (LCF).

    Classes. An interactive ticket goes as if its tenant had had INTERACTIVE_LEAD less virtual service: before
    all others while shares are about equal, and never so far that a flood marked interactive would take the
    share of a tenant that marks nothing. Batch tickets go when nothing else waits, and besides get `batch_share`
    of the work granted while they wait.

    Inside a tenant and class the earliest deadline goes first.

    Locality. Within `window` of the least virtual service the ticket with the longest cached prefix goes first
    (the quantum of DLPM, arXiv 2501.14312, as a window on VTC). 0 is plain VTC. The bound on the service of two
    tenants grows by twice the window, and by twice the lead where both classes wait.
    """

    entitles = True

    def __init__(
        self,
        cached_tokens: CachedTokens,
        *,
        lift: bool = True,
        window: float = 0.0,
        batch_share: float = BATCH_SHARE,
    ) -> None:
        self._cached_tokens = cached_tokens
        self._lift = lift
        self._window = window
        self._batch_rate = batch_share / (1.0 - batch_share)
        self._batch_credit = 0.0
        self._front: LazyHeap[tuple[TenantAccount, str]] = LazyHeap()
        self._batch: LazyHeap[tuple[TenantAccount, str]] = LazyHeap()
        self._counters: LazyHeap[TenantAccount] = LazyHeap()
        self._changed: dict[TenantAccount, None] = {}

    def lane(self, ticket: Ticket) -> str:
        return ticket.service_class

    def rank(self, ticket: Ticket, arrival: float, now: float) -> float:
        deadlines = (ticket.remaining_ttft_ms, ticket.remaining_deadline_ms)
        first = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return arrival + NO_DEADLINE_SECONDS if first is None else now + first / 1000.0

    def arrive(self, tenant: TenantAccount, now: float) -> None:
        if not self._lift or now < tenant.keeps_place_until:
            return
        self._update()
        floor = self._counters.first() or self.last_to_leave
        if floor is not None:
            tenant.counter = max(tenant.counter, floor.counter)

    def leave(self, tenant: TenantAccount) -> None:
        self.last_to_leave = tenant

    def touch(self, tenant: TenantAccount) -> None:
        # Many changes between two decisions cost one move.
        self._changed[tenant] = None

    def charge(self, tenant: TenantAccount, entry: QueuedTicket, cost: float, now: float) -> None:
        if entry.lane == "batch":
            self._batch_credit = max(0.0, self._batch_credit - cost)
        elif self._batch:
            self._batch_credit += self._batch_rate * cost

    def front(self, now: float, count: int) -> list[QueuedTicket]:
        self._update()
        if not self._batch:
            self._batch_credit = 0.0
        if self._batch_is_due():
            return self._heads(self._batch, count) + self._heads(self._front, count - 1)
        heads = self._heads(self._front, count)
        if heads and self._window > 0:
            heads = self._prefer_cached(heads)
        if len(heads) < count:
            heads += self._heads(self._batch, count - len(heads))
        return heads

    def _heads(self, heap: LazyHeap[tuple[TenantAccount, str]], count: int) -> list[QueuedTicket]:
        if count == 1:
            first = heap.first()
            return [] if first is None else [first[0].lanes[first[1]][0]]
        return [tenant.lanes[lane][0] for tenant, lane in heap.smallest(count)]

    def _batch_is_due(self) -> bool:
        first = self._batch.first()
        return first is not None and self._batch_credit >= first[0].lanes[first[1]][0].cost

    def _prefer_cached(self, heads: list[QueuedTicket]) -> list[QueuedTicket]:
        """Put the ticket of the window with most of its prefix cached in front; of equals, the one due first."""
        nodes = self._front.smallest(LOCALITY_CANDIDATES)
        limit = self._front.key(nodes[0])[0] + self._window
        best, best_value = heads[0], (self._cached_tokens(heads[0].ticket), -heads[0].rank)
        for node in nodes:
            if self._front.key(node)[0] > limit:
                break
            lane = node[0].lanes[node[1]]
            for entry in islice(lane, LOCALITY_LOOKAHEAD):
                if entry.rank > lane[0].rank + LOCALITY_SECONDS:
                    break
                value = (self._cached_tokens(entry.ticket), -entry.rank)
                if value > best_value:
                    best, best_value = entry, value
        return [best] + [entry for entry in heads if entry is not best]

    def _update(self) -> None:
        for tenant in self._changed:
            if tenant.queued:
                self._counters.set(tenant, (tenant.counter, tenant.number))
            else:
                self._counters.discard(tenant)
            key = tenant.key
            for lane, heap, lead in (
                ("interactive", self._front, INTERACTIVE_LEAD),
                ("default", self._front, 0.0),
                ("batch", self._batch, 0.0),
            ):
                queue = tenant.lanes.get(lane)
                if queue:
                    heap.set((tenant, lane), (key - lead, queue[0].rank, queue[0].order))
                else:
                    heap.discard((tenant, lane))
        self._changed.clear()
