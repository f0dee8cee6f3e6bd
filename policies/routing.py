"""Which engine a ticket goes to: the one that would be done with it first."""

from __future__ import annotations

from collections.abc import Iterable

from policies.engine_load import EngineLoad
from policies.service import ServicePrices
from policies.tickets import Ticket


def ticket_cost(ticket: Ticket, prices: ServicePrices, cached_tokens: int = 0) -> float:
    """Priced work of a ticket when `cached_tokens` of its input are in the prefix cache."""
    return prices.cost(
        computed_input=ticket.input_tokens - cached_tokens,
        cached_input=cached_tokens,
        output=ticket.predicted_output_tokens,
    )


def choose_engine(ticket: Ticket, engines: Iterable[EngineLoad], prices: ServicePrices) -> EngineLoad | None:
    """Of the engines that can take the ticket now, the one with least work, the ticket's own included.

    A cached prefix makes the ticket cheaper on one engine: it draws the ticket there until the queue of work
    has grown by what it saves.
    """
    fitting = [engine for engine in engines if engine.fits(ticket)]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return min(
        fitting, key=lambda engine: engine.work + ticket_cost(ticket, prices, engine.cached_tokens(ticket))
    )
