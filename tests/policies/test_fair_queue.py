"""Rules of the fair queue one by one: caps, order, lift, booking, gates, epochs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
from queue_building import granted, make_queue, report, ticket

from policies.service import ServicePrices
from policies.tickets import Grant, Refusal


def test_grant_carries_epochs_attempt_and_queued_time_with_age() -> None:
    queue = make_queue()
    queue.observe_report(report(engine_epoch=7))
    assert queue.push(ticket("r", attempt=2, age_ms=500.0), now=10.0) is None
    grant = queue.next_grant(now=11.0)
    assert grant == Grant("r", 2, queue_epoch=3, engine="e0", engine_epoch=7, queued_ms=1500.0)
    assert queue.next_grant(now=11.0) is None
    assert len(queue) == 0


def test_nothing_is_granted_before_the_first_report() -> None:
    queue = make_queue()
    queue.push(ticket("r"), 0.0)
    assert queue.next_grant(0.0) is None
    queue.observe_report(report())
    assert granted(queue) == ["r"]


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"sequences": 0},
        {"kv_share": float("nan")},
    ],
)
def test_bad_tickets_are_refused_loudly_and_change_nothing(changes: dict[str, Any]) -> None:
    queue = make_queue()
    with pytest.raises(ValueError, match="must be positive"):
        queue.push(ticket("r", **changes), 0.0)
    assert len(queue) == 0 and queue.snapshot() == {}
    queue.observe_report(report())
    queue.push(ticket("good"), 0.0)
    assert granted(queue) == ["good"]


@pytest.mark.parametrize(
    "changes", [{"policy": "random"}, {"max_queued_requests": 0}, {"max_queued_per_tenant": 0}]
)
def test_bad_arguments_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        make_queue(**changes)


# Caps


def test_tenant_cap_refuses_that_tenant_only() -> None:
    queue = make_queue(max_queued_per_tenant=2)
    assert queue.push(ticket("a1"), 0.0) is None
    assert queue.push(ticket("a2"), 0.0) is None
    refusal = queue.push(ticket("a3"), 0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.request, refusal.code) == ("a3", "queue_full")
    assert "max_queued_per_tenant" in refusal.message
    assert refusal.retry_after_ms is not None and refusal.retry_after_ms > 0
    assert queue.push(ticket("b1", "b"), 0.0) is None
    assert len(queue) == 3


def test_flood_shuts_nobody_out() -> None:
    queue = make_queue(max_queued_requests=100)

    def flood(tenant: str) -> int:
        outcomes = [queue.push(ticket(f"{tenant}{i}", tenant), 0.0) for i in range(200)]
        refused = [outcome for outcome in outcomes if outcome is not None]
        assert all(r.code == "queue_full" and "max_queued_requests" in r.message for r in refused)
        return outcomes.count(None)

    assert flood("a") == 50
    assert flood("b") == 25
    assert flood("c") == 13
    assert queue.push(ticket("d0", "d"), 0.0) is None


def test_tokens_are_capped_like_requests() -> None:
    queue = make_queue(max_queued_tokens=1000, max_queued_tokens_per_tenant=600)

    def flood(tenant: str) -> int:
        outcomes = [queue.push(ticket(f"{tenant}{i}", tenant, input_tokens=20), 0.0) for i in range(50)]
        assert all(
            o.code == "queue_full" and "max_queued_tokens" in o.message for o in outcomes if o is not None
        )
        return outcomes.count(None)

    assert flood("a") == 25, "half of all"
    assert flood("b") == 13
    refusal = queue.push(ticket("c0", "c", input_tokens=300), 0.0)
    assert isinstance(refusal, Refusal) and "760 tokens are waiting" in refusal.message
    assert queue.push(ticket("c1", "c", input_tokens=240), 0.0) is None
    assert queue.push(ticket("d0", "d", input_tokens=1), 0.0) is not None


def test_tenant_token_cap_names_itself() -> None:
    queue = make_queue(max_queued_tokens=1000, max_queued_tokens_per_tenant=60)
    assert queue.push(ticket("a0", input_tokens=50), 0.0) is None
    refusal = queue.push(ticket("a1", input_tokens=11), 0.0)
    assert isinstance(refusal, Refusal) and "max_queued_tokens_per_tenant" in refusal.message
    assert queue.push(ticket("a2", input_tokens=10), 0.0) is None


def test_total_cap_is_hard() -> None:
    queue = make_queue(max_queued_requests=20)
    for tenant in range(40):
        for i in range(20):
            queue.push(ticket(f"{tenant}-{i}", str(tenant)), 0.0)
    assert len(queue) == 20


# Identity of a request


def test_same_ticket_again_replaces_and_is_granted_once() -> None:
    queue = make_queue(max_queued_per_tenant=1)
    queue.observe_report(report())
    assert queue.push(ticket("r"), 0.0) is None
    assert queue.push(ticket("r"), 1.0) is None
    assert len(queue) == 1
    assert granted(queue, 2.0) == ["r"]


def test_higher_attempt_replaces_and_a_lower_one_is_ignored() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("r", attempt=1), 0.0)
    queue.push(ticket("r", attempt=2), 1.0)
    queue.push(ticket("r", attempt=1), 2.0)
    grant = queue.next_grant(3.0)
    assert grant is not None and grant.attempt == 2
    assert grant.queued_ms == 3000.0, "the place of the first ask is kept"
    queue.push(ticket("r", attempt=1), 3.0)
    assert queue.next_grant(3.0) is None


def test_replacing_the_only_ticket_is_no_return_and_lifts_nothing() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("a1"), 0.0)
    queue.push(ticket("b1", "b"), 0.0)
    queue.observe_report(report(step=1, served={"b": 100.0}))
    queue.push(ticket("a1", attempt=1), 0.0)
    assert queue.snapshot()["a"].key == 0.0


def test_asking_again_takes_back_the_grant_in_flight() -> None:
    queue = make_queue()
    queue.observe_report(report(max_num_seqs=1))
    queue.push(ticket("r"), 0.0)
    assert granted(queue, 0.0) == ["r"]
    booked = queue.snapshot()["a"].booked
    queue.push(ticket("r"), 0.5)
    assert queue.snapshot()["a"].booked == 0.0
    assert granted(queue, 0.5) == ["r"], "the room of the first grant is free again"
    assert queue.snapshot()["a"].booked == booked


def test_withdraw() -> None:
    queue = make_queue()
    queue.observe_report(report(max_num_seqs=1))
    queue.push(ticket("r", attempt=1), 0.0)
    assert not queue.withdraw("r", 0), "a stale withdrawal must not hit a newer attempt"
    assert queue.withdraw("r", 1)
    assert not queue.withdraw("r", 1)
    assert granted(queue) == []
    queue.push(ticket("s"), 0.0)
    assert granted(queue) == ["s"]
    assert queue.withdraw("s", 0), "a grant in flight gives its room back"
    queue.push(ticket("t"), 0.0)
    assert granted(queue) == ["t"]


def test_expire_counts_the_age_a_ticket_came_with() -> None:
    queue = make_queue()
    queue.push(ticket("fresh"), 10.0)
    queue.push(ticket("aged", age_ms=3000.0), 10.0)
    queue.push(ticket("other", "b"), 8.0)
    assert queue.expire(11.0, 4000.0) == [ticket("aged", age_ms=3000.0)]
    assert [t.request for t in queue.expire(12.0, 4000.0)] == ["other"]
    assert queue.expire(12.0, 4000.0) == []
    assert queue.snapshot()["a"].queued == 1


# Order


def test_within_a_tenant_the_age_decides() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("second"), 5.0)
    queue.push(ticket("first", age_ms=2000.0), 6.0)
    queue.push(ticket("third"), 7.0)
    assert granted(queue, 7.0) == ["first", "second", "third"]


def test_fcfs_goes_by_arrival_over_all_tenants() -> None:
    queue = make_queue("fcfs")
    queue.observe_report(report(served={}))
    queue.observe_report(report(step=1, served={"a": 1e6}))
    queue.push(ticket("a1"), 1.0)
    queue.push(ticket("b1", "b"), 2.0)
    queue.push(ticket("a2"), 3.0)
    queue.push(ticket("c1", "c", age_ms=3500.0), 4.0)
    assert granted(queue, 4.0) == ["c1", "a1", "b1", "a2"]


def test_vtc_alternates_by_booked_work_and_weight() -> None:
    queue = make_queue(prices=ServicePrices(output=2.0))
    queue.observe_report(report(max_num_batched_tokens=1000))
    for i in range(3):
        queue.push(ticket(f"a{i}"), 0.0)
    for i in range(6):
        queue.push(ticket(f"b{i}", "b", weight=2.0), 0.0)
    # Each grant costs 20: a moves by 20, b by 10.
    assert granted(queue)[:6] == ["a0", "b0", "b1", "a1", "b2", "b3"]


def test_least_served_tenant_goes_first() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("a1"), 0.0)
    queue.push(ticket("b1", "b"), 0.0)
    queue.observe_report(report(step=1, served={"a": 50.0, "b": 10.0}))
    assert granted(queue) == ["b1", "a1"]


def test_a_new_weight_does_not_rewrite_the_past() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("a1"), 0.0)
    queue.observe_report(report(step=1, served={"a": 100.0}))
    queue.push(ticket("a2", weight=10.0), 0.0)
    assert queue.snapshot()["a"].key == 100.0
    queue.observe_report(report(step=2, served={"a": 200.0}))
    assert queue.snapshot()["a"].key == 110.0


# Lift


def test_lift_to_the_least_of_the_waiting() -> None:
    queue = make_queue()
    queue.observe_report(report(max_num_seqs=0, running=1))
    for tenant in "ab":
        queue.push(ticket(f"{tenant}1", tenant), 0.0)
    queue.observe_report(report(step=1, running=1, max_num_seqs=0, served={"a": 300.0, "b": 200.0}))
    queue.push(ticket("c1", "c"), 0.0)
    assert queue.snapshot()["c"].key == 200.0
    queue.push(ticket("c2", "c"), 0.0)
    assert queue.snapshot()["c"].key == 200.0


def test_lift_to_the_last_to_leave_when_nobody_waits() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("a1"), 0.0)
    assert granted(queue) == ["a1"]
    queue.observe_report(report(step=1, served={"a": 400.0}, accepted=(("a1", 0),)))
    queue.push(ticket("b1", "b"), 0.0)
    assert queue.snapshot()["b"].key == 400.0
    # b leaves last, and is behind nobody: a stays where it is.
    queue.withdraw("b1", 0)
    queue.push(ticket("a2"), 0.0)
    assert queue.snapshot()["a"].key == 400.0


def test_lift_never_lowers() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("b1", "b"), 0.0)
    queue.observe_report(report(step=1, served={"a": 500.0, "b": 1.0}))
    queue.push(ticket("a1"), 0.0)
    assert queue.snapshot()["a"].key == 500.0
    queue.withdraw("a1", 0)
    queue.withdraw("b1", 0)
    queue.push(ticket("a2"), 0.0)
    assert queue.snapshot()["a"].key == 500.0


# Reports


def test_a_lost_report_does_no_harm_and_an_old_one_is_ignored() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.observe_report(report(step=5, served={"a": 50.0}))
    queue.observe_report(report(step=3, served={"a": 30.0}, running=8))
    assert queue.snapshot()["a"].served == 50.0
    queue.push(ticket("a1"), 0.0)
    assert granted(queue) == ["a1"], "the old report's full engine was not believed"
    queue.observe_report(report(step=9, served={"a": 90.0}))
    assert queue.snapshot()["a"].served == 90.0


def test_an_idle_engine_reports_the_same_step_again() -> None:
    queue = make_queue()
    queue.observe_report(report(step=4))
    queue.push(ticket("a1"), 0.0)
    assert granted(queue) == ["a1"]
    queue.observe_report(report(step=4, accepted=(("a1", 0),), outstanding={"a": 20.0}, waiting=1))
    assert queue.snapshot()["a"].booked == 20.0


def test_engine_restart_counts_from_zero_and_voids_its_grants() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.observe_report(report(step=9, served={"a": 90.0}, outstanding={"a": 7.0}))
    queue.push(ticket("a1"), 0.0)
    assert granted(queue) == ["a1"]
    queue.observe_report(report(engine_epoch=2, step=1, served={"a": 5.0}))
    state = queue.snapshot()["a"]
    assert (state.served, state.booked, state.key) == (95.0, 0.0, 95.0)
    queue.observe_report(report(engine_epoch=1, step=10, served={"a": 100.0}))
    assert queue.snapshot()["a"].served == 95.0
    queue.push(ticket("a2"), 0.0)
    grant = queue.next_grant(0.0)
    assert grant is not None and grant.engine_epoch == 2


def test_engines_add_up() -> None:
    queue = make_queue()
    queue.observe_report(report("e0"))
    queue.observe_report(report("e1"))
    queue.observe_report(report("e0", step=1, served={"a": 10.0}, outstanding={"a": 1.0, "b": 4.0}))
    queue.observe_report(report("e1", step=1, served={"a": 5.0}, outstanding={"a": 2.0}))
    a, b = queue.snapshot()["a"], queue.snapshot()["b"]
    assert (a.served, a.booked, b.booked) == (15.0, 3.0, 4.0)
    queue.observe_report(report("e0", step=2, served={"a": 11.0}))
    a, b = queue.snapshot()["a"], queue.snapshot()["b"]
    assert (a.served, a.booked, b.booked) == (16.0, 2.0, 0.0)


def test_service_from_before_this_queue_moves_nobody() -> None:
    """A new queue does not know the old one's lifts: raw service would put newcomers in front for hours."""
    queue = make_queue()
    queue.push(ticket("b1", "b"), 0.0)
    queue.push(ticket("a1"), 0.0)
    queue.observe_report(report(step=1000, served={"a": 1e6, "b": 10.0}))
    a, b = queue.snapshot()["a"], queue.snapshot()["b"]
    assert (a.served, a.key, b.key) == (1e6, 0.0, 0.0)
    queue.observe_report(report(step=1001, served={"a": 1e6 + 3, "b": 10.0}))
    assert queue.snapshot()["a"].key == 3.0


def test_forgotten_engine_keeps_its_service_and_is_not_counted_twice() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.observe_report(report(step=4, served={"a": 40.0}, outstanding={"a": 9.0}))
    queue.push(ticket("a1"), 0.0)
    assert granted(queue) == ["a1"]
    queue.forget_engine("e0")
    queue.forget_engine("e0")
    state = queue.snapshot()["a"]
    assert (state.served, state.booked) == (40.0, 0.0)
    queue.push(ticket("a2"), 0.0)
    assert queue.next_grant(0.0) is None
    queue.observe_report(report(step=6, served={"a": 60.0}))
    assert queue.snapshot()["a"].served == 60.0
    assert granted(queue) == ["a2"]


# Booking


def test_booked_is_grants_in_flight_plus_outstanding() -> None:
    queue = make_queue()
    queue.observe_report(report())
    queue.push(ticket("a1", input_tokens=100, predicted_output_tokens=30), 0.0)
    assert queue.snapshot()["a"].booked == 0.0
    assert granted(queue) == ["a1"]
    assert queue.snapshot()["a"].booked == 160.0
    queue.observe_report(report(step=1, accepted=(("a1", 0),), outstanding={"a": 160.0}, running=1))
    assert queue.snapshot()["a"].booked == 160.0
    queue.observe_report(report(step=2, served={"a": 100.0}, outstanding={"a": 60.0}, running=1))
    assert queue.snapshot()["a"].key == 160.0
    queue.observe_report(report(step=3, served={"a": 110.0}))
    assert queue.snapshot()["a"].key == 110.0, "an early end gives back what was predicted too much"


def test_acceptance_by_another_engine_or_of_another_attempt_settles_nothing() -> None:
    queue = make_queue()
    queue.observe_report(report("e0"))
    queue.push(ticket("a1", attempt=1), 0.0)
    assert granted(queue) == ["a1"]
    queue.observe_report(report("e1", accepted=(("a1", 1),)))
    queue.observe_report(report("e0", step=1, accepted=(("a1", 0),)))
    assert queue.snapshot()["a"].booked == 20.0


def test_an_unconfirmed_grant_expires_after_two_seconds() -> None:
    queue = make_queue()
    queue.observe_report(report(max_num_seqs=1))
    queue.push(ticket("a1"), 0.0)
    queue.push(ticket("a2"), 0.0)
    assert granted(queue, 10.0) == ["a1"]
    assert granted(queue, 11.9) == []
    assert granted(queue, 12.0) == ["a2"]
    assert queue.snapshot()["a"].booked == 20.0


# What an engine can take


def test_sequences_in_the_engine_and_on_their_way_share_the_slots() -> None:
    queue = make_queue()
    queue.observe_report(report(max_num_seqs=8, running=3, waiting=1))
    for i in range(3):
        queue.push(ticket(f"r{i}", sequences=2), 0.0)
    assert granted(queue) == ["r0", "r1"]


def test_prefill_buffer_is_two_steps() -> None:
    queue = make_queue()
    prefill = {"waiting_prefill_tokens": 150, "tenant_prefill_tokens": {"a": 150}}
    queue.observe_report(report(max_num_seqs=100, running=1, **prefill))
    for i in range(3):
        queue.push(ticket(f"r{i}", input_tokens=30), 0.0)
    assert granted(queue) == ["r0", "r1"], "150, then 180 are under 2 * 100, 210 is not"


def test_a_prompt_larger_than_the_buffer_enters_an_empty_buffer() -> None:
    queue = make_queue()
    queue.observe_report(report(running=1))
    queue.push(ticket("r0", input_tokens=5000), 0.0)
    queue.push(ticket("r1", input_tokens=1), 0.0)
    assert granted(queue) == ["r0"]


def test_pages_of_prompt_and_one_more_per_sequence() -> None:
    queue = make_queue()
    # 17 tokens a sequence take 2 pages, and 1 more: 6 for two sequences.
    queue.observe_report(report(running=1, free_pages=11))
    for i in range(2):
        queue.push(ticket(f"r{i}", input_tokens=34, sequences=2), 0.0)
    assert granted(queue) == ["r0"]
    queue.observe_report(report(step=1, running=1, free_pages=12))
    assert granted(queue) == ["r1"], "6 of 12 pages are for the grant in flight"


def test_c01_an_empty_engine_takes_a_request_over_its_limits_alone() -> None:
    queue = make_queue()
    queue.observe_report(report(free_pages=99, total_pages=100, running=1))
    queue.push(ticket("large", input_tokens=16 * 200), 0.0)
    queue.push(ticket("next"), 0.0)
    assert granted(queue) == []
    queue.observe_report(report(step=1, free_pages=100, total_pages=100))
    assert granted(queue) == ["large"], "it is for the engine to judge"


def test_c01_more_sequences_than_slots_do_not_wait_for_an_empty_engine() -> None:
    """A quarter of the slots is enough to go in: the rest of the sequences wait inside."""
    queue = make_queue()
    queue.observe_report(report(max_num_seqs=8, running=7))
    queue.push(ticket("wide", sequences=64, input_tokens=640), 0.0)
    queue.push(ticket("next", "b"), 0.0)
    assert granted(queue) == []
    queue.observe_report(report(step=1, max_num_seqs=8, running=6))
    assert granted(queue) == ["wide", "next"], "nor does it lock out a tenant under its share"


def test_c01_sequences_that_fill_the_pool_together_do_not_wait_for_it() -> None:
    queue = make_queue()
    # Eight sequences of 31 pages; half of the pool holds one of them.
    queue.observe_report(report(max_num_seqs=100, running=1, free_pages=31, total_pages=100))
    queue.push(ticket("wide", sequences=8, input_tokens=8 * 16 * 30), 0.0)
    assert granted(queue) == ["wide"]


def test_a_head_that_does_not_fit_stops_everybody() -> None:
    queue = make_queue()
    queue.observe_report(report(running=1, free_pages=10))
    queue.push(ticket("big", "a", input_tokens=160), 0.0)
    queue.push(ticket("small", "b", input_tokens=1), 0.0)
    assert granted(queue) == []
    queue.observe_report(report(step=1, running=1, free_pages=20))
    assert granted(queue) == ["big", "small"]


def test_a_draining_engine_gets_nothing() -> None:
    queue = make_queue()
    queue.observe_report(report(draining=True))
    queue.push(ticket("r"), 0.0)
    assert granted(queue) == []


def test_the_least_loaded_engine_that_fits_is_chosen() -> None:
    queue = make_queue()
    queue.observe_report(report("e0", outstanding={"x": 50.0}, running=1))
    queue.observe_report(report("e1", outstanding={"x": 25.0}, running=1))
    queue.observe_report(report("e2", outstanding={"x": 0.0}, running=8))
    engines = []
    for i in range(4):
        queue.push(ticket(f"r{i}"), 0.0)
        grant = queue.next_grant(0.0)
        assert grant is not None
        engines.append(grant.engine)
    # Each grant adds 20: 25, 45 on e1; then e0 at 50, then e1 at 65.
    assert engines == ["e1", "e1", "e0", "e1"]


def test_snapshot() -> None:
    queue = make_queue()
    queue.push(ticket("a1"), 0.0)
    queue.push(ticket("a2"), 0.0)
    queue.push(ticket("b1", "b", weight=4.0), 0.0)
    state = queue.snapshot()
    assert {name: s.queued for name, s in state.items()} == {"a": 2, "b": 1}
    assert state["b"].weight == 4.0


def test_a_decision_is_cheap_with_ten_thousand_queued_over_a_thousand_tenants() -> None:
    """The median is a tenth of the bound or less; the bound leaves room for a busy machine."""
    queue = make_queue(max_queued_requests=20_000)
    queue.observe_report(report(max_num_seqs=10**6, max_num_batched_tokens=10**9, free_pages=10**9))
    for i in range(10_000):
        queue.push(ticket(f"r{i}", f"t{i % 1000}"), i * 1e-4)
    decisions, enqueues = [], []
    for i in range(500):
        start = time.perf_counter()
        assert queue.next_grant(1.0) is not None
        decisions.append(time.perf_counter() - start)
        start = time.perf_counter()
        queue.push(ticket(f"s{i}", f"t{i % 1000}"), 1.0)
        enqueues.append(time.perf_counter() - start)
    decision, enqueue = statistics.median(decisions), statistics.median(enqueues)
    print(f"decision {decision * 1e6:.0f} us, push {enqueue * 1e6:.0f} us")
    assert decision < 1e-3
    assert enqueue < 1e-3
