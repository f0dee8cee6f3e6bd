"""Who may go before a head that does not fit: only what will have ended before the head's reserved start.

EASY backfill (Lifka, "The ANL/IBM SP scheduling system", 1995), with the engine's steps as the clock and predicted
output as the run time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.engine_load import EngineLoad, room_to_enter
from policies.tickets import Ticket


@dataclass(frozen=True)
class Reservation:
    """The engine that can take the head first, and in how many of its steps."""

    engine: EngineLoad
    steps: int


def reserve(head: Ticket, engines: Iterable[EngineLoad]) -> Reservation | None:
    """Where and when the head will fit, as its engine's requests end by prediction; None if no engine tells."""
    reservations = [
        Reservation(engine, _steps_until_room(head, engine))
        for engine in engines
        if not engine.report.draining and engine.report.remaining
    ]
    return min(reservations, key=lambda reservation: reservation.steps, default=None)


def may_backfill(ticket: Ticket, engine: EngineLoad, reservation: Reservation) -> bool:
    """Whether the ticket, which fits the engine, will not delay the head that holds the reservation."""
    return engine is not reservation.engine or _run_steps(ticket, engine) <= reservation.steps


def _steps_until_room(head: Ticket, engine: EngineLoad) -> int:
    slots = engine.report.max_num_seqs - engine.sequences
    pages = engine.free_pages
    needed_slots, needed_pages = room_to_enter(head, engine.report)
    ends = sorted(engine.report.remaining)
    for steps, freed_pages in ends:
        slots += 1
        pages += freed_pages
        if slots >= needed_slots and pages >= needed_pages:
            return steps
    return ends[-1][0]  # a head larger than the engine starts when the engine is empty


def _run_steps(ticket: Ticket, engine: EngineLoad) -> int:
    """Steps from start to end. Half of the budget is taken to be left for the prompt."""
    prefill = -(-2 * ticket.input_tokens // engine.report.max_num_batched_tokens)
    return prefill + -(-ticket.predicted_output_tokens // ticket.sequences)
