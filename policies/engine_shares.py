"""Slots and KV pages of one engine, shared among tenants: who is admitted next, and from whom room is taken back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TenantUse:
    """What one tenant with live requests holds in an engine.

    `running` requests hold a slot each and `pages` KV pages together. `head_order` is the arrival order of its oldest
    waiting request, None when nothing of it waits; `head_pages` are the pages of that one's table, cached ones among
    them. `kv_share`, in (0, 1], is the part of the KV pages that its cap allows; 1 is no cap.
    """

    weight: float
    running: int
    pages: int
    head_order: int | None = None
    head_pages: int = 0
    kv_share: float = 1.0


class EngineShares:
    """Weight shares of an engine's slots and pages among the tenants that have live requests in it.

    A share is a guarantee, not a limit: what others leave unused is borrowed, and given back when they return. Every
    tenant is entitled to at least one running request. Borrowed room is reclaimed only for a tenant that stays within
    its shares with it, only from one that is above its own, and never from a tenant's last running request. What was
    taken from a tenant would lift it above its share again, so it is entitled to no reclaim in turn: nothing
    oscillates.

    A `kv_share` caps the pages that a tenant may hold while another one waits. It is entitled to no more than that, and
    pages beyond its cap are taken back even for a tenant that goes over its own share by weight, though not over its
    cap. A tenant's only request is bound by no cap.
    """

    def __init__(self, uses: Mapping[str, TenantUse], slots: int, pages: int) -> None:
        """`slots` and `pages` are those of the engine. Raises ValueError for a weight that is not positive."""
        if any(use.weight <= 0 or not 0 < use.kv_share <= 1 for use in uses.values()):
            raise ValueError("weights must be positive, kv_share must be in (0, 1]")
        self._uses = uses
        self._slots = slots
        self._pages = pages
        self._total_weight = sum(use.weight for use in uses.values())
        self._kv_unit = kv_unit(sum(use.kv_share for use in uses.values()))

    def next_waiting(self) -> str | None:
        """The tenant whose oldest waiting request is to be admitted next; None when nothing waits.

        It is the one of smallest dominant share per weight (Ghodsi et al., "Dominant Resource Fairness", NSDI'11):
        the larger of its parts of all slots and of all pages; of equals the one that waits longest. Tenants whose
        head goes over their own page share come after all others, unless nothing of theirs runs. Those that it would
        lift over their cap are passed over while another tenant waits.
        """
        waiting = [name for name, use in self._uses.items() if use.head_order is not None]
        if len(waiting) > 1:
            waiting = [name for name in waiting if not self._goes_over(name, self.page_cap(name))]
        return min(waiting, key=self._order, default=None)

    def _order(self, name: str) -> tuple[bool, float, int]:
        use = self._uses[name]
        dominant = max(use.running / self._slots, use.pages / self._pages) / use.weight
        return self._goes_over(name, self.page_share(name)), dominant, use.head_order or 0

    def _goes_over(self, name: str, pages: float) -> bool:
        """With its head the tenant, which has running requests, would hold more than so many pages."""
        use = self._uses[name]
        return use.running > 0 and use.pages + use.head_pages > pages

    def slot_share(self, name: str) -> float:
        """Slots a tenant is entitled to."""
        return max(1.0, self._slots * self._uses[name].weight / self._total_weight)

    def page_share(self, name: str) -> float:
        """KV pages a tenant is entitled to."""
        return min(self._pages * self._uses[name].weight / self._total_weight, self.page_cap(name))

    def page_cap(self, name: str) -> float:
        """KV pages that a tenant may hold while another one waits; infinite for one without a cap."""
        share = self._uses[name].kv_share
        return math.inf if share >= 1.0 else share * self._kv_unit * self._pages

    def reclaim_from(self, name: str, *, slot: bool) -> str | None:
        """The tenant whose newest running request is to make room for `name`'s head; None: it has to wait.

        What is lacking is a slot, or else pages. The giver is the tenant furthest over its share of that, or, for a
        tenant that has its share by weight already, furthest over its cap.
        """
        own = self._uses[name]
        pages_of = self.page_share
        if self._goes_over(name, self.page_share(name)) or (
            own.running and own.running + 1 > self.slot_share(name)
        ):
            if slot or self._goes_over(name, self.page_cap(name)):
                return None
            pages_of = self.page_cap
        excess = {
            other: use.running / self.slot_share(other) if slot else use.pages / pages_of(other)
            for other, use in self._uses.items()
            if other != name and use.running > 1
        }
        giver = max(excess, key=lambda other: excess[other], default=None)
        return giver if giver is not None and excess[giver] > 1.0 else None


def kv_unit(total_kv_share: float) -> float:
    """By how much caps are raised when those of the live tenants, `total_kv_share`, do not make up the whole pool: what
    nobody there may use would be idle. At least 1."""
    return 1.0 / total_kv_share if 0.0 < total_kv_share < 1.0 else 1.0
