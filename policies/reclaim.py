"""Entry by right: a tenant under its share of slots and pages gets in though others hold them all.

The engine then takes the place from a tenant over its share, by preemption. So long generations on every slot cannot
lock a tenant out, and idle capacity can be borrowed without a promise to give it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.engine_load import EngineLoad, prompt_pages
from policies.tickets import Ticket

RECLAIM_SEQUENCES = 2
"""Sequences on their way to an engine that need a preemption there: what it can do within two steps."""

Held = Callable[[EngineLoad, str], int]


def needs_reclaim(ticket: Ticket, engine: EngineLoad) -> bool:
    """Whether the engine has to preempt somebody to run the ticket."""
    return not (engine.has_slots(ticket) and engine.has_pages(ticket))


def choose_reclaim(
    ticket: Ticket, engines: Iterable[EngineLoad], fraction_of: Callable[[str], float]
) -> EngineLoad | None:
    """The engine that can make room for the ticket by preemption; None if the tenant has no right to it.

    `fraction_of` is a tenant's part of the pool, 0 to 1: its weight by the weights of all tenants that are live or
    waiting. The ticket's tenant must stay within that part of the slots, and of the pages, wherever they are short;
    one that holds nothing has a right to one ticket. Room is taken only from tenants that stay at or above their own
    part without it: otherwise two tenants would take the same place from each other for ever.
    """
    loads = [engine for engine in engines if not engine.report.draining]
    slots = sum(engine.report.max_num_seqs for engine in loads)
    pages = sum(engine.report.total_pages for engine in loads)
    fraction = fraction_of(ticket.tenant)
    candidates: list[tuple[float, float, EngineLoad]] = []
    for engine in loads:
        missing_slots = engine.sequences + ticket.sequences - engine.report.max_num_seqs
        needed_pages = prompt_pages(ticket, engine.report.page_size)
        missing_pages = needed_pages - engine.free_pages
        over = 0.0
        for missing, asked, total, held in (
            (missing_slots, ticket.sequences, slots, EngineLoad.tenant_sequences),
            (missing_pages, needed_pages, pages, EngineLoad.tenant_pages),
        ):
            if missing <= 0:
                continue
            own = sum(held(other, ticket.tenant) for other in loads)
            if own > 0 and own + asked > fraction * total:
                break
            over = _over_share(ticket.tenant, engine, loads, total, fraction_of, held)
            if over < min(missing, asked):
                break
        else:
            pending = engine.reclaiming
            if needs_reclaim(ticket, engine) and pending and pending + ticket.sequences > RECLAIM_SEQUENCES:
                continue
            if engine.has_prefill_room() or engine.has_prefill_share(ticket.tenant, fraction):
                candidates.append((-over, engine.work, engine))
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _over_share(
    tenant: str,
    engine: EngineLoad,
    loads: list[EngineLoad],
    total: int,
    fraction_of: Callable[[str], float],
    held: Held,
) -> float:
    """What the other tenants could give up on this engine and still hold their part of the pool."""
    return sum(
        max(
            0.0,
            min(held(engine, other), sum(held(load, other) for load in loads) - fraction_of(other) * total),
        )
        for other in engine.tenants()
        if other != tenant
    )
