"""Who goes before a head that does not fit."""

from __future__ import annotations

from typing import Any

from queue_building import granted, make_queue, report, ticket

from policies.fair_queue import FairQueue

BUSY: dict[str, Any] = {
    "running": 3,
    "max_num_seqs": 4,
    "free_pages": 10,
    "total_pages": 100,
    "live_sequences": {"z": 3},
    "remaining": ((5, 10), (40, 30), (200, 50)),
}
"""Ten pages are free now, twenty in 5 steps, fifty in 40 and all in 200."""


def blocked(head_tokens: int, **changes: Any) -> FairQueue:
    """A queue whose first ticket, of a tenant far behind the others, does not fit the pages."""
    queue = make_queue()
    queue.observe_report(report(**(BUSY | changes)))
    queue.push(ticket("head", "a", input_tokens=head_tokens), 0.0)
    queue.push(ticket("other", "b"), 0.0)
    queue.withdraw("other", 0)
    queue.observe_report(report(**(BUSY | changes | {"step": 1, "served": {"b": 500.0}})))
    assert queue.next_grant(0.0) is None
    return queue


def test_what_ends_before_the_reserved_start_goes_first() -> None:
    queue = blocked(16 * 48)  # 49 pages: in 40 steps
    queue.push(ticket("long", "b", predicted_output_tokens=45), 0.0)
    assert granted(queue) == []
    queue.push(ticket("short", "b", predicted_output_tokens=30, age_ms=1000.0), 0.0)
    assert granted(queue) == ["short"]


def test_the_prompt_takes_steps_too() -> None:
    queue = blocked(16 * 48)
    # 150 tokens at half of a budget of 100: 3 steps.
    queue.push(ticket("b", "b", input_tokens=120, predicted_output_tokens=38), 0.0)
    assert granted(queue) == []
    queue.push(ticket("b", "b", input_tokens=120, predicted_output_tokens=37), 0.0)
    assert granted(queue) == ["b"]


def test_sequences_of_a_ticket_run_side_by_side() -> None:
    queue = blocked(16 * 48, running=2, live_sequences={"z": 2})
    queue.push(ticket("b", "b", predicted_output_tokens=70, sequences=2), 0.0)
    assert granted(queue) == ["b"]


def test_the_head_goes_as_soon_as_it_fits() -> None:
    queue = blocked(16 * 48)
    queue.push(ticket("short", "b", predicted_output_tokens=10), 0.0)
    queue.observe_report(report(**(BUSY | {"step": 2, "free_pages": 60})))
    assert granted(queue) == ["head", "short"]


def test_without_predictions_nobody_passes() -> None:
    queue = blocked(16 * 48, remaining=())
    queue.push(ticket("short", "b", predicted_output_tokens=1), 0.0)
    assert granted(queue) == []


def test_engines_the_head_does_not_wait_for_are_free_to_others() -> None:
    queue = blocked(16 * 48)
    queue.observe_report(report("e1", **(BUSY | {"remaining": ((900, 90),)})))
    queue.push(ticket("long", "b", predicted_output_tokens=800), 0.0)
    grant = queue.next_grant(0.0)
    assert grant is not None and (grant.request, grant.engine) == ("long", "e1")


def test_a_head_larger_than_the_engine_waits_for_it_to_be_empty() -> None:
    queue = blocked(16 * 500)
    queue.push(ticket("b", "b", predicted_output_tokens=150), 0.0)
    assert granted(queue) == ["b"], "the last of the others ends in 200 steps"
    queue.observe_report(report(step=3))
    assert granted(queue) == ["head"]
