"""A fair queue's successor goes on with the same counters."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from queue_building import granted, make_queue, report, ticket

from policies.fair_queue import FairQueue
from policies.service_accounts import KEEPS_PLACE_SECONDS, QueueState

FULL = {"max_num_seqs": 0, "running": 1}


def predecessor() -> FairQueue:
    """a and b wait, 300 and 200 served; c was served 50 long ago."""
    queue = make_queue(queue_epoch=7)
    queue.observe_report(report(**FULL))
    for tenant in "cab":
        queue.push(ticket(f"{tenant}0", tenant), 0.0)
    queue.withdraw("c0", 0)
    queue.observe_report(report(step=9, served={"a": 300.0, "b": 200.0, "c": 50.0}, **FULL))
    return queue


def successor(state: QueueState, now: float = 100.0) -> FairQueue:
    queue = make_queue(queue_epoch=0)
    queue.restore(state, now)
    return queue


def test_service_since_the_snapshot_is_counted_once() -> None:
    queue = successor(predecessor().export_state())
    assert queue.queue_epoch == 7
    queue.observe_report(report(step=20, served={"a": 310.0, "b": 200.0, "c": 50.0}))
    state = queue.snapshot()
    assert {name: s.served for name, s in state.items()} == {"a": 310.0, "b": 200.0, "c": 50.0}
    assert state["a"].key == 310.0


def test_those_that_waited_keep_their_places_and_others_are_lifted() -> None:
    queue = successor(predecessor().export_state())
    queue.push(ticket("a0", "a"), 100.5)
    queue.push(ticket("b0", "b"), 100.6)
    queue.push(ticket("c1", "c"), 100.7)
    keys = {name: s.key for name, s in queue.snapshot().items()}
    assert keys == {"a": 300.0, "b": 200.0, "c": 200.0}
    queue.observe_report(report(step=20, served={"a": 300.0, "b": 200.0, "c": 50.0}))
    assert granted(queue, 101.0)[0] == "b0", "though a asked first"


def test_a_place_is_kept_for_seconds_only() -> None:
    queue = successor(predecessor().export_state())
    queue.push(ticket("a0", "a"), 100.5)
    queue.push(ticket("b0", "b"), 100.0 + KEEPS_PLACE_SECONDS)
    assert queue.snapshot()["b"].key == 300.0


def test_the_last_to_leave_is_remembered() -> None:
    old = predecessor()
    old.withdraw("a0", 0)
    old.withdraw("b0", 0)
    queue = successor(old.export_state())
    queue.push(ticket("c1", "c"), 100.0)
    assert queue.snapshot()["c"].key == 200.0


def test_an_engine_that_restarted_meanwhile_counts_from_zero() -> None:
    queue = successor(predecessor().export_state())
    queue.observe_report(report(engine_epoch=2, step=1, served={"a": 5.0}))
    assert queue.snapshot()["a"].served == 305.0


def test_a_state_is_a_copy_and_plain_data() -> None:
    old = predecessor()
    state = old.export_state()
    text = json.dumps(asdict(state))
    old.observe_report(report(step=30, served={"a": 900.0}, **FULL))
    assert json.dumps(asdict(state)) == text


def test_a_queue_that_has_begun_takes_no_state() -> None:
    queue = make_queue()
    queue.push(ticket("a"), 0.0)
    with pytest.raises(ValueError, match="before the first ticket"):
        queue.restore(predecessor().export_state(), 1.0)
