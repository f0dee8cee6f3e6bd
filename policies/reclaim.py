"""Shares of a pool's slots and pages, and entry by right.

A tenant under its share gets in though others hold everything. The engine then takes the place from a tenant over its
share, by preemption. So long generations on every slot cannot lock a tenant out, and idle capacity can be borrowed
without a promise to give it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.engine_load import EngineLoad, prompt_pages
from policies.tickets import Ticket

RECLAIM_SEQUENCES = 2
"""Sequences on their way to an engine that need a preemption there: what it can do within two steps."""

Held = Callable[[EngineLoad, str], int]


class PoolShares:
    """Who holds how much of the engines that take grants, and how much each tenant's share is.

    `fraction_of` is a tenant's part of the pool, in (0, 1]: its weight by the weights of all tenants that are live or
    waiting.
    """

    def __init__(self, engines: Iterable[EngineLoad], fraction_of: Callable[[str], float]) -> None:
        self.engines = [engine for engine in engines if not engine.report.draining]
        self.fraction_of = fraction_of
        self.slots = sum(engine.report.max_num_seqs for engine in self.engines)
        self.pages = sum(engine.report.total_pages for engine in self.engines)

    def held(self, tenant: str, held: Held) -> int:
        return sum(held(engine, tenant) for engine in self.engines)

    def is_over(self, tenant: str) -> bool:
        """The tenant shares the pool with others and holds its part of the slots, or of the pages, or more."""
        fraction = self.fraction_of(tenant)
        return fraction < 1.0 and (
            self.held(tenant, EngineLoad.tenant_sequences) >= max(1.0, fraction * self.slots)
            or self.held(tenant, EngineLoad.tenant_pages) >= max(1.0, fraction * self.pages)
        )

    def over_share(self, tenant: str, engine: EngineLoad, total: int, held: Held) -> float:
        """What the tenants other than `tenant` could give up on `engine` and still hold their part of `total`."""
        return sum(
            max(0.0, min(held(engine, other), self.held(other, held) - self.fraction_of(other) * total))
            for other in engine.tenants()
            if other != tenant
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
    candidates: list[tuple[float, float, EngineLoad]] = []
    for engine in shares.engines:
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


def _room_by_right(ticket: Ticket, engine: EngineLoad, shares: PoolShares) -> float | None:
    """What others hold over their share of the resource that is short, 0 if none is; None without a right."""
    pages = prompt_pages(ticket, engine.report.page_size)
    over = 0.0
    for asked, free, total, held in (
        (
            ticket.sequences,
            engine.report.max_num_seqs - engine.sequences,
            shares.slots,
            EngineLoad.tenant_sequences,
        ),
        (pages, engine.free_pages, shares.pages, EngineLoad.tenant_pages),
    ):
        if asked <= free:
            continue
        own = shares.held(ticket.tenant, held)
        if own > 0 and own + asked > shares.fraction_of(ticket.tenant) * total:
            return None
        over = shares.over_share(ticket.tenant, engine, total, held)
        if over < min(asked, asked - free):
            return None
    return over
