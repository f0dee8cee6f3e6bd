"""Deadlines that are promised, demoted or refused, and what a promise is worth."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from queue_building import make_queue, report, ticket

from policies.admission import LONG_CONTEXT_STEPS
from policies.fair_queue import FairQueue
from policies.latency_model import StepEstimate
from policies.pool_speed import pool_speed
from policies.tickets import EngineReport, Refusal

SPEED = StepEstimate(5e-3, 1e-4, 2e-4, 0.0, 0.0, 0.1)
FULL = {"running": 8, "live_sequences": {"z": 8}, "free_pages": 1000}


def engine(**changes: object) -> EngineReport:
    return report(**({"step_estimate": SPEED} | changes))


def queue_with(**changes: object) -> FairQueue:
    queue = make_queue()
    queue.observe_report(engine(**changes))
    return queue


def refused(answer: Refusal | None) -> Refusal:
    assert answer is not None
    return answer


def test_an_idle_pool_promises_what_it_can_do_and_no_more() -> None:
    queue = queue_with()
    answer = refused(queue.push(ticket("now", input_tokens=500, remaining_ttft_ms=1.0), 0.0))
    assert answer.code == "deadline_unattainable" and "too late" in answer.message
    assert answer.earliest_deadline_ms is not None and answer.retry_after_ms is not None
    # five steps of 100 tokens take 75 ms
    assert 75 < answer.earliest_deadline_ms < 500
    assert answer.retry_after_ms == pytest.approx(answer.earliest_deadline_ms - 1.0)
    assert len(queue) == 0
    again = ticket("later", input_tokens=500, remaining_ttft_ms=answer.earliest_deadline_ms + 0.01)
    assert queue.push(again, 0.0) is None
    grant = queue.next_grant(0.0)
    assert grant is not None and not grant.demoted
    assert grant.predicted_ttft_ms == pytest.approx(answer.earliest_deadline_ms, abs=0.1)


def test_the_deadline_of_the_last_token_leaves_room_for_the_output() -> None:
    queue = queue_with()
    for bound in (0, 400):
        asked = ticket(
            "r",
            input_tokens=100,
            predicted_output_tokens=50,
            output_tokens_bound=bound,
            remaining_deadline_ms=1.0,
        )
        answer = refused(queue.push(asked, 0.0))
        assert answer.earliest_deadline_ms is not None
        output = max(bound, 50) - 1
        assert answer.earliest_deadline_ms > output * 6.0, "a step takes at least 5 ms and 10 %"
        again = ticket(
            f"again{bound}",
            input_tokens=100,
            predicted_output_tokens=50,
            output_tokens_bound=bound,
            remaining_deadline_ms=answer.earliest_deadline_ms + 1.0,
        )
        assert queue.push(again, 0.0) is None
        queue.withdraw(again.request, 0)


def test_a_queue_of_its_own_fills_up_and_then_refuses() -> None:
    """Every ticket takes about 0.03 s of the pool: how many fit into 2 s is not more than that, nor far less."""
    queue = queue_with(**FULL)
    answers = [
        queue.push(
            ticket(f"r{i}", input_tokens=300, predicted_output_tokens=10, remaining_ttft_ms=2000.0), 0.0
        )
        for i in range(200)
    ]
    admitted = [answer is None for answer in answers]
    count = admitted.index(False)
    assert 10 <= count <= 60
    earliest = [a.earliest_deadline_ms for a in answers if a is not None]
    assert min(e for e in earliest if e is not None) > 2000.0


def test_only_the_own_share_is_promised() -> None:
    """With three more tenants that share the pool, about a quarter of the work can be promised in the same time."""

    def promised(others: int) -> int:
        queue = queue_with(**FULL)
        for number in range(others):
            queue.push(
                ticket(f"other{number}", f"o{number}", input_tokens=300, predicted_output_tokens=10), 0.0
            )
        for number in range(300):
            asked = ticket(
                f"r{number}", input_tokens=300, predicted_output_tokens=10, remaining_ttft_ms=4000.0
            )
            if queue.push(asked, 1.0) is not None:
                return number
        return 300

    alone, shared = promised(0), promised(3)
    assert 0.15 <= shared / alone <= 0.35


def test_what_a_tenant_decodes_leaves_less_of_a_step_to_its_prompts() -> None:
    def earliest(decodes: str) -> float:
        queue = queue_with(max_num_seqs=64, running=40, live_sequences={decodes: 40})
        for number in range(10):
            queue.push(ticket(f"o{number}", "other", input_tokens=300), 0.0)
        deadline = refused(
            queue.push(ticket("r", input_tokens=300, remaining_ttft_ms=1.0), 0.0)
        ).earliest_deadline_ms
        assert deadline is not None
        return deadline

    # Of 60 tokens beside 40 decodes it gets 10 instead of 50: half of the step is its share.
    assert 1.5 * earliest("other") < earliest("a")


def test_idle_tenants_do_not_count_for_ever() -> None:
    queue = queue_with(**FULL)
    queue.push(ticket("other", "o", input_tokens=300), 0.0)
    queue.withdraw("other", 0)
    earliest = [
        refused(queue.push(ticket("x", input_tokens=300, remaining_ttft_ms=0.0), now)).earliest_deadline_ms
        for now in (1.0, 60.0)
    ]
    assert earliest[0] is not None and earliest[1] is not None
    assert earliest[1] <= earliest[0]


def test_an_earlier_deadline_may_pass_but_not_break_a_promise() -> None:
    queue = queue_with(**FULL)
    count = 0
    while queue.push(ticket(f"r{count}", input_tokens=300, remaining_ttft_ms=2000.0), 0.0) is None:
        count += 1
    answer = refused(queue.push(ticket("urgent", input_tokens=300, remaining_ttft_ms=1500.0), 0.0))
    assert "earlier promises" in answer.message
    assert answer.earliest_deadline_ms is not None and answer.earliest_deadline_ms >= 2000.0
    for number in range(count // 2):
        queue.withdraw(f"r{number}", 0)
    assert queue.push(ticket("urgent", input_tokens=300, remaining_ttft_ms=1500.0), 0.0) is None


def test_demotion_is_marked_and_goes_on_as_batch_work() -> None:
    queue = queue_with()
    assert queue.push(ticket("late", remaining_ttft_ms=0.0, demotable=True), 0.0) is None
    queue.push(ticket("normal", "b"), 0.0)
    first, second = queue.next_grant(0.0), queue.next_grant(0.0)
    assert first is not None and second is not None
    assert (first.request, first.demoted) == ("normal", False)
    assert (second.request, second.demoted, second.predicted_ttft_ms) == ("late", True, None)


def test_what_cannot_be_kept_ends_before_it_starts() -> None:
    queue = queue_with(**FULL)
    assert queue.push(ticket("strict", input_tokens=300, remaining_ttft_ms=2000.0), 0.0) is None
    soft = ticket("soft", "b", input_tokens=300, remaining_ttft_ms=2000.0, demotable=True)
    assert queue.push(soft, 0.0) is None
    assert queue.break_promises(1.0) == []
    answers = queue.break_promises(2.0)
    assert [(a.request, a.code) for a in answers] == [("strict", "deadline_exceeded")]
    assert len(queue) == 1
    queue.observe_report(engine(step=1))
    grant = queue.next_grant(2.1)
    assert grant is not None and grant.request == "soft" and grant.demoted
    assert grant.queued_ms == pytest.approx(2100.0)


def test_long_contexts_are_tested_more_strictly() -> None:
    queue = queue_with(max_num_batched_tokens=100)
    earliest = []
    for tokens in (100 * LONG_CONTEXT_STEPS - 1, 100 * LONG_CONTEXT_STEPS):
        answer = refused(queue.push(ticket("r", input_tokens=tokens, remaining_ttft_ms=1.0), 0.0))
        assert answer.earliest_deadline_ms is not None
        earliest.append(answer.earliest_deadline_ms)
    assert earliest[1] > 1.3 * earliest[0]


def test_what_the_kv_cache_cannot_hold_is_never_promised() -> None:
    queue = queue_with(total_pages=50, free_pages=50)
    answer = refused(queue.push(ticket("r", input_tokens=900, remaining_ttft_ms=1e6), 0.0))
    assert "KV cache" in answer.message and answer.earliest_deadline_ms is None


def test_a_full_kv_cache_delays_what_would_overflow_it() -> None:
    def earliest(peak: int) -> float:
        queue = queue_with(
            peak_kv_tokens=peak, total_pages=100, free_pages=100, running=4, live_sequences={"z": 4}
        )
        queue.push(ticket("mix", "z", predicted_output_tokens=100), 0.0)
        answer = refused(queue.push(ticket("r", input_tokens=400, remaining_ttft_ms=0.0), 0.0))
        assert answer.earliest_deadline_ms is not None
        return answer.earliest_deadline_ms

    assert earliest(1600) > earliest(400)


def test_nothing_is_promised_before_an_engine_tells_its_speed() -> None:
    queue = make_queue()
    answer = refused(queue.push(ticket("r", remaining_ttft_ms=1e6), 0.0))
    assert (answer.code, answer.earliest_deadline_ms) == ("deadline_unattainable", None)
    assert queue.push(ticket("r"), 0.0) is None


def test_baseline_orders_promise_nothing() -> None:
    queue = make_queue(policy="fcfs")
    queue.observe_report(engine())
    assert queue.push(ticket("r", remaining_ttft_ms=0.0), 0.0) is None
    grant = queue.next_grant(0.0)
    assert grant is not None and grant.predicted_ttft_ms is None and not grant.demoted


def test_predictions_learn_from_first_tokens() -> None:
    """First tokens that come ten times later than expected widen the margin until they would be refused."""
    queue = queue_with()
    asked = 400.0
    for number in range(100):
        now = float(number)
        answer = queue.push(ticket(f"r{number}", input_tokens=500, remaining_ttft_ms=asked), now)
        if answer is not None:
            assert number > 0
            return
        assert queue.next_grant(now) is not None
        queue.observe_report(
            engine(step=number + 1, accepted=((f"r{number}", 0),), first_tokens=((f"r{number}", 0),)),
            now + 0.8,
        )
    pytest.fail("the margin did not grow")


tickets = st.lists(
    st.tuples(
        st.integers(0, 3),  # tenant
        st.none() | st.floats(50, 8000) | st.sampled_from([1000.0, 2000.0]),
        st.floats(0, 0.2),  # time since the one before
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(tickets, st.booleans())
def test_earliest_deadlines_are_true_and_promises_survive_newcomers(
    arrivals: list[tuple[int, float | None, float]], full: bool
) -> None:
    """Whatever waits: the deadline that a refusal names is granted when asked for, and no newcomer with a deadline
    makes a promise infeasible that was feasible the moment before. Sizes are equal, so that the pool's measured mix,
    and with it the speed that everything is measured by, stands still."""
    queue = queue_with(**(FULL if full else {}))
    admission = queue._admission
    now = 0.0
    for number, (tenant, deadline, pause) in enumerate(arrivals):
        now += pause
        service_class = "interactive" if tenant < 2 else "default"
        fields = {"input_tokens": 300, "predicted_output_tokens": 30, "service_class": service_class}
        before = kept(queue, now)
        answer = queue.push(
            ticket(f"r{number}", f"t{tenant}", weight=1.0 + tenant, remaining_ttft_ms=deadline, **fields), now
        )
        if deadline is None:
            continue
        after = kept(queue, now)
        if answer is None:
            assert all(after[request] for request, was in before.items() if was)
        else:
            if answer.earliest_deadline_ms is None:
                assert "earlier promises" in answer.message and answer.retry_after_ms is not None
                assert not admission._time.is_active(queue._accounts.tenant(f"t{tenant}").number, now)
                continue
            assert answer.earliest_deadline_ms >= deadline
            asked = ticket(
                f"r{number}",
                f"t{tenant}",
                weight=1.0 + tenant,
                remaining_ttft_ms=answer.earliest_deadline_ms + 1.0,
                **fields,
            )
            assert queue.push(asked, now) is None
    assert len(admission) <= len(queue)


def kept(queue: FairQueue, now: float) -> dict[str, bool]:
    """By request: whether its promise is feasible now, by the walk's own measure."""
    admission = queue._admission
    admission._update()
    for account in queue._accounts.tenants.values():
        admission._refresh_starts(account, 0, account.key)
    table = admission._table
    feasible: dict[str, bool] = {}
    rate = sum(
        s.service_per_second for s in pool_speed(queue._engines.values(), admission._mix, queue._prices)
    )
    for level in (0, 1):
        rows = table.level == level
        if not rows.any():
            continue
        fluid = admission._time.fluid(now, level)
        work = admission._service_before(rows, level, 0.0, now, fluid, own=False)
        in_time = admission._kept(rows, level, work / rate, now)
        feasible.update(zip(table.requests(rows), in_time.tolist(), strict=True))
    return feasible


def test_pages_beyond_a_cap_are_not_promised() -> None:
    """What a tenant may hold while nobody else waits is borrowed."""
    earliest = {}
    for kv_share in (1.0, 0.5, 0.1):
        queue = queue_with(
            running=2,
            live_sequences={"a": 2},
            free_pages=500,
            tenant_pages={"a": 95},
            remaining=((50, 48),) * 2,
        )
        queue.push(ticket("seen", "b", kv_share=1.0), 0.0)
        asked = ticket("r", input_tokens=160, remaining_ttft_ms=1.0, kv_share=kv_share)
        earliest[kv_share] = refused(queue.push(asked, 0.0)).earliest_deadline_ms
    assert earliest[1.0] == earliest[0.5], "106 of 1000 pages are within its half"
    assert earliest[0.1] is not None and earliest[0.5] is not None and earliest[0.1] > earliest[0.5]
