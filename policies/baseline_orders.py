"""Orders to compare with: first come first served, request-rate limit, deficit round robin, DLPM."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict

from policies.lazy_heap import Key, LazyHeap
from policies.queue_order import CachedTokens, QueueOrder
from policies.tenant_account import MAIN_LANE, QueuedTicket, TenantAccount

REQUESTS_PER_MINUTE = 30.0
"""Rate of a tenant of weight 1 under the request-rate limit."""

QUANTUM = 1024.0
"""Priced tokens that a tenant of weight 1 gets in one round of deficit round robin, and of DLPM."""


class FcfsOrder(QueueOrder):
    """The oldest ticket of all goes first."""

    def __init__(self) -> None:
        self._heads = LazyHeap(self._key)

    def arrive(self, tenant: TenantAccount, now: float) -> None: ...

    def leave(self, tenant: TenantAccount) -> None: ...

    def touch(self, tenant: TenantAccount) -> None:
        self._heads.changed(tenant)

    def charge(self, tenant: TenantAccount, entry: QueuedTicket, cost: float, now: float) -> None: ...

    def front(self, now: float, count: int) -> list[QueuedTicket]:
        heads = [tenant.lanes[MAIN_LANE][0] for tenant in self._heads.smallest(count)]
        return [head for head in heads if self._earliest_start(head) <= now]

    def _key(self, tenant: TenantAccount) -> Key | None:
        queue = tenant.lanes.get(MAIN_LANE)
        return (self._earliest_start(queue[0]), queue[0].order) if queue else None

    def _earliest_start(self, head: QueuedTicket) -> float:
        return head.arrival


class RateLimitOrder(FcfsOrder):
    """First come first served, with REQUESTS_PER_MINUTE times its weight for each tenant; what is more waits.

    A minute's requests may come at once (GCRA). Capacity that nobody may use stays idle.
    """

    def __init__(self) -> None:
        super().__init__()
        self._allowed_until: dict[str, float] = {}  # theoretical arrival time of a tenant's next request

    def charge(self, tenant: TenantAccount, entry: QueuedTicket, cost: float, now: float) -> None:
        seconds = 60.0 / (REQUESTS_PER_MINUTE * entry.ticket.weight)
        self._allowed_until[tenant.name] = max(self._allowed_until.get(tenant.name, now), now) + seconds

    def _earliest_start(self, head: QueuedTicket) -> float:
        seconds = 60.0 / (REQUESTS_PER_MINUTE * head.ticket.weight)
        return max(head.arrival, self._allowed_until.get(head.ticket.tenant, -math.inf) - 60.0 + seconds)


class _DeficitOrder(QueueOrder):
    """Tenants spend credit: quanta given so far less the work granted to them. It may go below zero.

    A tenant that leaves the queue loses what is left. Decisions are O(tenants) when credit has run out.
    """

    def __init__(self) -> None:
        self._ring: OrderedDict[TenantAccount, None] = OrderedDict()
        self._given: dict[TenantAccount, float] = {}
        self.refills = 0
        """Rounds in which every waiting tenant got its quantum: a measure of contention."""

    def arrive(self, tenant: TenantAccount, now: float) -> None:
        self._ring[tenant] = None
        # A debt stays: a tenant must not shed it by coming back.
        self._given[tenant] = min(self._given.get(tenant, math.inf), _spent(tenant))

    def leave(self, tenant: TenantAccount) -> None:
        del self._ring[tenant]

    def touch(self, tenant: TenantAccount) -> None: ...

    def front(self, now: float, count: int) -> list[QueuedTicket]:
        if not self._ring:
            return []
        credits = {tenant: self._given[tenant] - _spent(tenant) for tenant in self._ring}
        if max(credits.values()) <= 0:
            # As many rounds at once as it takes until somebody can go.
            rounds = min(int(-credit / (QUANTUM * tenant.weight)) + 1 for tenant, credit in credits.items())
            self.refills += rounds
            for tenant in credits:
                self._given[tenant] += rounds * QUANTUM * tenant.weight
                credits[tenant] += rounds * QUANTUM * tenant.weight
        return self._choose([tenant for tenant, credit in credits.items() if credit > 0])[:count]

    @abstractmethod
    def _choose(self, tenants: list[TenantAccount]) -> list[QueuedTicket]:
        """Tickets of tenants with credit, which come in ring order."""


class DrrOrder(_DeficitOrder):
    """Deficit round robin: a tenant goes on while it has credit, then it is the next one's turn.

    Shreedhar and Varghese, SIGCOMM'95, with credit below zero as in the VTC paper's evaluation.
    """

    def _choose(self, tenants: list[TenantAccount]) -> list[QueuedTicket]:
        return [tenant.lanes[MAIN_LANE][0] for tenant in tenants]

    def charge(self, tenant: TenantAccount, entry: QueuedTicket, cost: float, now: float) -> None:
        if tenant in self._ring and self._given[tenant] - _spent(tenant) <= 0:
            self._ring.move_to_end(tenant)


class DlpmOrder(_DeficitOrder):
    """Deficit longest prefix match (Cao et al., arXiv 2501.14312): of all tenants with credit, the longest cached
    prefix goes first."""

    def __init__(self, cached_tokens: CachedTokens) -> None:
        super().__init__()
        self._cached_tokens = cached_tokens

    def charge(self, tenant: TenantAccount, entry: QueuedTicket, cost: float, now: float) -> None: ...

    def _choose(self, tenants: list[TenantAccount]) -> list[QueuedTicket]:
        best = [
            max(tenant.lanes[MAIN_LANE][:16], key=lambda entry: self._cached_tokens(entry.ticket))
            for tenant in tenants
        ]
        return sorted(
            best, key=lambda entry: (-self._cached_tokens(entry.ticket), entry.arrival, entry.order)
        )


def _spent(tenant: TenantAccount) -> float:
    return tenant.served + tenant.booked
