"""The orders that VTC is compared with."""

from __future__ import annotations

from collections import Counter

import pytest
from queue_building import granted, make_queue, report, ticket

from policies.baseline_orders import QUANTUM, REQUESTS_PER_MINUTE
from policies.fair_queue import QueuePolicy
from policies.tickets import EngineReport

ROOM = {"max_num_seqs": 10**6, "max_num_batched_tokens": 10**9, "free_pages": 10**9, "running": 1}


def open_engine(**changes: object) -> EngineReport:
    return report(**(ROOM | changes))


def test_request_rate_limit_lets_a_minute_through_and_holds_the_rest() -> None:
    queue = make_queue("rpm")
    queue.observe_report(open_engine())
    for i in range(200):
        queue.push(ticket(f"a{i}", "a"), 0.0)
        queue.push(ticket(f"b{i}", "b", weight=2.0), 0.0)
    burst = Counter(request[0] for request in granted(queue, 0.0))
    assert burst == {"a": REQUESTS_PER_MINUTE, "b": 2 * REQUESTS_PER_MINUTE}
    assert granted(queue, 60.0 / REQUESTS_PER_MINUTE / 2) == ["b60"]
    later = Counter(request[0] for request in granted(queue, 10.0))
    assert later == {"a": REQUESTS_PER_MINUTE / 6, "b": REQUESTS_PER_MINUTE / 3 - 1}


def test_request_rate_limit_is_fcfs_below_it() -> None:
    queue = make_queue("rpm")
    queue.observe_report(open_engine())
    for i, tenant in enumerate("abba"):
        queue.push(ticket(f"{tenant}{i}", tenant), float(i))
    assert granted(queue, 4.0) == ["a0", "b1", "b2", "a3"]


def test_least_counter_first_gives_credit_for_idle_time_and_vtc_does_not() -> None:
    def order(policy: QueuePolicy) -> list[str]:
        queue = make_queue(policy)
        queue.observe_report(open_engine())
        queue.push(ticket("a0", "a"), 0.0)
        queue.observe_report(open_engine(step=1, served={"a": 100.0}))
        for i in range(4):
            queue.push(ticket(f"a{i}", "a"), 0.0)
            queue.push(ticket(f"b{i}", "b"), 0.0)
        return granted(queue)

    assert order("lcf")[:4] == ["b0", "b1", "b2", "b3"]
    assert order("vtc")[:4] == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("policy", ["drr", "dlpm"])
def test_deficits_share_work_by_weight(policy: QueuePolicy) -> None:
    queue = make_queue(policy, max_queued_requests=10_000, max_queued_per_tenant=10_000)
    queue.observe_report(open_engine())
    for i in range(1200):
        queue.push(ticket(f"a{i}", "a"), 0.0)  # 20 each
        queue.push(ticket(f"b{i}", "b", input_tokens=90, weight=2.0), 0.0)  # 100 each
    work = {"a": 0.0, "b": 0.0}
    for request in granted(queue)[:1000]:
        work[request[0]] += 20.0 if request[0] == "a" else 100.0
    assert abs(work["a"] - work["b"] / 2) <= 2 * QUANTUM


def test_deficit_round_robin_takes_turns_of_a_quantum() -> None:
    queue = make_queue("drr")
    queue.observe_report(open_engine())
    for i in range(100):
        queue.push(ticket(f"a{i}", "a"), 0.0)
        queue.push(ticket(f"b{i}", "b"), 0.0)
    turn = int(QUANTUM / 20) + 1
    order = [request[0] for request in granted(queue)]
    assert order[: turn + 1] == ["a"] * turn + ["b"]


def test_a_debt_outlives_a_visit_and_credit_does_not() -> None:
    queue = make_queue("drr")
    queue.observe_report(open_engine())
    queue.push(ticket("big", "a", input_tokens=5000), 0.0)
    assert granted(queue) == ["big"]
    for i in range(100):
        queue.push(ticket(f"a{i}", "a"), 0.0)
        queue.push(ticket(f"b{i}", "b"), 0.0)
    assert [request[0] for request in granted(queue)].index("a") >= 100, "5 quanta behind"


def test_dlpm_takes_the_longest_cached_prefix_of_those_with_credit() -> None:
    queue = make_queue("dlpm")
    queue.observe_report(open_engine(page_hashes_added=(1, 2)))
    queue.push(ticket("cold", "a", input_tokens=50), 0.0)
    queue.push(ticket("warm", "b", input_tokens=50, page_hashes=(1, 2)), 1.0)
    queue.push(ticket("mild", "a", input_tokens=50, page_hashes=(1, 9)), 2.0)
    assert granted(queue, 2.0) == ["warm", "mild", "cold"]


def test_dlpm_stops_a_hot_prefix_when_its_credit_is_spent() -> None:
    queue = make_queue("dlpm", max_queued_requests=10_000)
    queue.observe_report(open_engine(page_hashes_added=(1,)))
    for i in range(200):
        queue.push(ticket(f"b{i}", "b", input_tokens=32, page_hashes=(1,)), 0.0)
        queue.push(ticket(f"a{i}", "a"), 0.0)
    cost = 16 + 0.1 * 16 + 2 * 5
    order = [request[0] for request in granted(queue)]
    assert QUANTUM / cost <= order.index("a") <= QUANTUM / cost + 1


@pytest.mark.parametrize("policy", ["fcfs", "rpm", "drr", "dlpm"])
def test_baselines_stop_at_a_head_that_does_not_fit(policy: QueuePolicy) -> None:
    queue = make_queue(policy)
    live = {"live_sequences": {"z": 1}, "remaining": ((1000, 990),)}
    queue.observe_report(report(running=1, free_pages=10, **live))
    queue.push(ticket("big", "a", input_tokens=160), 0.0)
    queue.push(ticket("small", "b", input_tokens=1), 0.0)
    assert granted(queue) == []
