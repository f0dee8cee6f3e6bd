"""The order of a fair queue: whose ticket goes next. The interface, and the weighted virtual token counter (VTC).

Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24), with weights, with predicted output charged on
grant and given back as service arrives, and with both branches of the lift.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice

from policies.lazy_heap import Key, LazyHeap
from policies.tenant_account import MAIN_LANE, QueuedTicket, TenantAccount
from policies.tickets import Ticket

CachedTokens = Callable[[Ticket], int]
"""Input tokens of a ticket that some engine has in its prefix cache."""

INTERACTIVE_LEAD = 4096.0
BATCH_SHARE = 0.1

NO_DEADLINE_SECONDS = 60.0
"""Where a ticket without a deadline stands among those of its tenant that have one: it never waits for ever."""

_DIGITS = 4

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

    def rank(self, arrival: float, due: float | None) -> float:
        """A ticket's place in its lane, smallest first. `due` is when its first token was promised, if it was."""
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
        """The next tickets in order, one per tenant before batch and one in batch; [0] is the one whose turn it is."""


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
        self._front = LazyHeap(self._front_key)
        self._batch = LazyHeap(self._batch_key)
        self._counters = LazyHeap(self._counter_key)
        self._changed: dict[TenantAccount, None] = {}

    def lane(self, ticket: Ticket) -> str:
        return ticket.service_class

    def rank(self, arrival: float, due: float | None) -> float:
        return arrival + NO_DEADLINE_SECONDS if due is None else due

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
        if tenant.queued:
            self._changed[tenant] = None

    def charge(self, tenant: TenantAccount, entry: QueuedTicket, cost: float, now: float) -> None:
        if entry.lane == "batch":
            self._batch_credit = max(0.0, self._batch_credit - cost)
        elif self._batch.first() is not None:
            self._batch_credit += self._batch_rate * cost

    def front(self, now: float, count: int) -> list[QueuedTicket]:
        self._update()
        batch = self._batch.first()
        if batch is None:
            self._batch_credit = 0.0
        elif self._batch_credit >= batch.lanes["batch"][0].cost:
            return self._heads(self._batch, count) + self._heads(self._front, count - 1)
        heads = self._heads(self._front, count)
        if heads and self._window > 0:
            heads = self._prefer_cached(heads)
        if len(heads) < count:
            heads += self._heads(self._batch, count - len(heads))
        return heads

    def _heads(self, heap: LazyHeap[TenantAccount], count: int) -> list[QueuedTicket]:
        if count == 1:
            first = heap.first()
            tenants = [] if first is None else [first]
        else:
            tenants = heap.smallest(count)
        return [
            _front_lane(tenant)[0] if heap is self._front else tenant.lanes["batch"][0] for tenant in tenants
        ]

    def _prefer_cached(self, heads: list[QueuedTicket]) -> list[QueuedTicket]:
        """Put the ticket of the window with most of its prefix cached in front; of equals, the one due first."""
        tenants = self._front.smallest(LOCALITY_CANDIDATES)
        limit = _virtual_start(tenants[0]) + self._window
        best, best_value = heads[0], (self._cached_tokens(heads[0].ticket), -heads[0].rank)
        for tenant in tenants:
            if _virtual_start(tenant) > limit:
                break
            lane = _front_lane(tenant)
            for entry in islice(lane, LOCALITY_LOOKAHEAD):
                if entry.rank > lane[0].rank + LOCALITY_SECONDS:
                    break
                value = (self._cached_tokens(entry.ticket), -entry.rank)
                if value > best_value:
                    best, best_value = entry, value
        return [best] + [entry for entry in heads if entry.ticket.tenant != best.ticket.tenant]

    def _update(self) -> None:
        for tenant in self._changed:
            if tenant.queued:
                self._front.changed(tenant)
                if "batch" in tenant.lanes:
                    self._batch.changed(tenant)
                if tenant not in self._counters:  # a counter never falls
                    self._counters.changed(tenant)
        self._changed.clear()

    # Keys of the heaps; None: nothing of the tenant waits there.

    def _front_key(self, tenant: TenantAccount) -> Key | None:
        lanes = tenant.lanes
        lane = lanes.get("interactive")
        lead = INTERACTIVE_LEAD
        if lane is None:
            lane, lead = lanes.get("default"), 0.0
            if lane is None:
                return None
        head = lane[0]
        # Rounded: what moves from booked to served must not move a key.
        return (round(tenant.key - lead, _DIGITS), head.rank, head.order)

    def _batch_key(self, tenant: TenantAccount) -> Key | None:
        lane = tenant.lanes.get("batch")
        return (round(tenant.key, _DIGITS), lane[0].rank, lane[0].order) if lane else None

    def _counter_key(self, tenant: TenantAccount) -> Key | None:
        return (tenant.counter, tenant.number) if tenant.queued else None


def _front_lane(tenant: TenantAccount) -> list[QueuedTicket]:
    """The tenant's most urgent lane before batch; empty when nothing waits there."""
    lanes = tenant.lanes
    return lanes.get("interactive") or lanes.get("default") or []


def _virtual_start(tenant: TenantAccount) -> float:
    """The tenant's virtual service, less its lead."""
    return tenant.key - INTERACTIVE_LEAD if "interactive" in tenant.lanes else tenant.key
