"""Shares of a pool's slots and pages, and entry by right.

A tenant under its share gets in though others hold everything. The engine then takes the place from a tenant over its
share, by preemption. So long generations on every slot cannot lock a tenant out, and idle capacity can be borrowed
without a promise to give it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from policies.engine_load import EngineLoad, prompt_pages, room_to_enter
from policies.engine_shares import kv_unit
from policies.tenant_account import TenantAccount
from policies.tickets import Ticket

RECLAIM_SEQUENCES = 2
"""Sequences on their way to an engine that need a preemption there: what it can do within two steps."""


class _Holdings:
    """Who holds how much of one resource, on each engine and in all."""

    def __init__(
        self, total: int, by_engine: dict[str, dict[str, int]], fraction_of: Callable[[str], float]
    ) -> None:
        self.total = total
        self._fraction_of = fraction_of
        self._by_engine = by_engine
        self._pool: dict[str, int] = {}
        for held in by_engine.values():
            for tenant, count in held.items():
                self._pool[tenant] = self._pool.get(tenant, 0) + count
        self._spare: dict[str, int] = {}  # what all tenants of an engine could give up there

    def of(self, tenant: str) -> int:
        return self._pool.get(tenant, 0)

    def share(self, tenant: str) -> float:
        return self._fraction_of(tenant) * self.total

    def over_share(self, tenant: str, engine: str) -> int:
        """What the tenants other than `tenant` could give up on the engine and still hold their share."""
        held = self._by_engine[engine]
        if engine not in self._spare:
            self._spare[engine] = sum(self._spare_of(other, count) for other, count in held.items())
        return self._spare[engine] - self._spare_of(tenant, held.get(tenant, 0))

    def _spare_of(self, tenant: str, held: int) -> int:
        # Each gives whole slots: fractions of many tenants make none.
        over = self._pool.get(tenant, 0) - self.share(tenant)
        return min(held, int(over)) if over > 0 else 0


class PoolShares:
    """Who holds how much of the engines that take grants, and how much each tenant's share and cap are.

    `account_of` gives every tenant that is live or waiting, `total_weight` and `total_kv_share` are their sums. Caps on
    pages bind while more than one tenant waits. Holds until a report comes, a grant is given or settled, or a tenant
    joins or leaves.
    """

    def __init__(
        self,
        engines: Iterable[EngineLoad],
        account_of: Callable[[str], TenantAccount],
        *,
        total_weight: float,
        total_kv_share: float,
        caps_bind: bool,
    ) -> None:
        self.engines = [engine for engine in engines if not engine.report.draining]
        self._account_of = account_of
        self._total_weight = total_weight
        self._kv_unit = kv_unit(total_kv_share)
        self._caps_bind = caps_bind
        self.slots = _Holdings(
            sum(engine.report.max_num_seqs for engine in self.engines),
            {engine.report.engine: engine.tenant_sequences() for engine in self.engines},
            self.fraction_of,
        )
        total_pages = sum(engine.report.total_pages for engine in self.engines)
        pages = {engine.report.engine: engine.tenant_pages() for engine in self.engines}
        self.pages = _Holdings(
            total_pages, pages, lambda tenant: min(self.fraction_of(tenant), self._cap_of(tenant))
        )
        self.capped_pages = _Holdings(total_pages, pages, self._cap_of)

    def fraction_of(self, tenant: str) -> float:
        """The tenant's part of the pool by weight, in (0, 1]."""
        return self._account_of(tenant).weight / self._total_weight

    def _cap_of(self, tenant: str) -> float:
        share = self._account_of(tenant).kv_share
        return math.inf if share >= 1.0 else share * self._kv_unit

    def open_to(self, ticket: Ticket) -> list[EngineLoad]:
        """The engines where the ticket does not lift its tenant over its cap. The only one there is bound by none."""
        if ticket.kv_share >= 1.0 or not self._caps_bind:
            return self.engines
        cap = self._cap_of(ticket.tenant)
        allowed = []
        for engine in self.engines:
            sequences, held = engine.held_by(ticket.tenant)
            pages = held + prompt_pages(ticket, engine.report.page_size)
            if not sequences or pages <= cap * engine.report.total_pages:
                allowed.append(engine)
        return allowed

    def is_over(self, tenant: str) -> bool:
        """The tenant shares the pool with others and holds its part of the slots, or of the pages, or more."""
        return self.fraction_of(tenant) < 1.0 and any(
            held.of(tenant) >= max(1.0, held.share(tenant)) for held in (self.slots, self.pages)
        )


def needs_reclaim(ticket: Ticket, engine: EngineLoad) -> bool:
    """Whether the engine has to preempt somebody to run the ticket."""
    return engine.sequences > 0 and not (engine.has_slots(ticket) and engine.has_pages(ticket))


def choose_reclaim(ticket: Ticket, shares: PoolShares) -> EngineLoad | None:
    """The engine that can make room for the ticket by preemption; None if the tenant has no right to it.

    The tenant must stay within its part of the slots, and of the pages, wherever they are short; one that holds
    nothing has a right to one ticket. Room is taken only from tenants that hold their part, or more, without it:
    otherwise two tenants would take the same place from each other for ever.
    """
    candidates: list[tuple[int, float, EngineLoad]] = []
    for engine in shares.open_to(ticket):
        over = _room_by_right(ticket, engine, shares)
        if over is None:
            continue
        pending = engine.reclaiming
        if needs_reclaim(ticket, engine) and pending and pending + ticket.sequences > RECLAIM_SEQUENCES:
            continue
        if engine.has_prefill_room() or engine.has_prefill_share(
            ticket.tenant, shares.fraction_of(ticket.tenant)
        ):
            candidates.append((-over, engine.work, engine))
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _room_by_right(ticket: Ticket, engine: EngineLoad, shares: PoolShares) -> int | None:
    """What others hold over their share of the resource that is short, 0 if none is; None without a right."""
    slots, pages = room_to_enter(ticket, engine.report)
    over = 0
    for asked, free, entitlements in (
        (slots, engine.report.max_num_seqs - engine.sequences, (shares.slots,)),
        (pages, engine.free_pages, (shares.pages, shares.capped_pages)),
    ):
        if asked <= free:
            continue
        rooms = [_over_share(ticket.tenant, engine.report.engine, asked, held) for held in entitlements]
        over = max(rooms)
        if over < min(asked, asked - free):
            return None
    return over


def _over_share(tenant: str, engine: str, asked: int, holdings: _Holdings) -> int:
    """What others could give up for a tenant that stays within its share with what it asks for; else -1."""
    own = holdings.of(tenant)
    if own > 0 and own + asked > holdings.share(tenant):
        return -1
    return holdings.over_share(tenant, engine)
