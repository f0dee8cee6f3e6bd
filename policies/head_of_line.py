"""Who goes when the first ticket of the order fits no engine: it keeps its place, unless it is over its own share."""

from __future__ import annotations

from collections.abc import Callable

from policies.backfill import may_backfill, reserve
from policies.engine_load import PREFILL_BUFFER_STEPS, EngineLoad
from policies.reclaim import PoolShares, choose_reclaim
from policies.routing import choose_engine
from policies.service import ServicePrices
from policies.tenant_account import QueuedTicket


def choose_instead(
    front: list[QueuedTicket],
    shares: PoolShares,
    prices: ServicePrices,
    key_of: Callable[[QueuedTicket], float],
) -> tuple[QueuedTicket, EngineLoad] | None:
    """A ticket of `front` that may go before front[0], and its engine. `key_of` is its tenant's virtual service.

    A tenant over its share of slots or pages is passed over, for one under its own that is ahead of it by no more
    than two steps' work: otherwise a tenant that needs few slots would be served for ever beside one that needs many.
    The first ticket that is not passed over has a start reserved; others go only if they have ended by then.
    """
    prefill = sum(engine.report.max_num_batched_tokens for engine in shares.engines)
    furthest = key_of(front[0]) + PREFILL_BUFFER_STEPS * prefill
    head = front[0]
    if shares.is_over(head.ticket.tenant):
        for entry in front[1:]:
            if shares.is_over(entry.ticket.tenant) or key_of(entry) > furthest:
                continue
            engine = choose_engine(entry.ticket, shares.open_to(entry.ticket), prices)
            engine = engine or choose_reclaim(entry.ticket, shares)
            if engine is not None:
                return entry, engine
            head = entry
            break
    reservation = reserve(head.ticket, shares.open_to(head.ticket))
    if reservation is None:
        return None
    for entry in front:
        if entry is head:
            continue
        allowed = [
            engine
            for engine in shares.open_to(entry.ticket)
            if may_backfill(entry.ticket, engine, reservation)
        ]
        engine = choose_engine(entry.ticket, allowed, prices)
        if engine is not None:
            return entry, engine
    return None
