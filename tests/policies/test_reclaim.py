"""A tenant under its share gets in though others hold every slot, every page or the whole prefill buffer."""

from __future__ import annotations

from typing import Any

import pytest

from policies.fair_queue import FairQueue, QueuePolicy
from policies.tickets import EngineReport, Ticket

SLOTS = 8


def full(held: dict[str, int], **changes: Any) -> EngineReport:
    """An engine whose slots are held as given; more than SLOTS means that the rest waits inside it."""
    live = sum(held.values())
    fields: dict[str, Any] = {
        "engine": "e0",
        "engine_epoch": 1,
        "step": 0,
        "served": {},
        "outstanding": {},
        "running": min(live, SLOTS),
        "waiting": max(0, live - SLOTS),
        "waiting_prefill_tokens": 0,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 100,
        "free_pages": 1000,
        "total_pages": 1000,
        "page_size": 16,
        "live_sequences": held,
    }
    return EngineReport(**(fields | changes))


def make_queue(report: EngineReport, policy: QueuePolicy = "vtc") -> FairQueue:
    queue = FairQueue(queue_epoch=1, policy=policy, max_queued_requests=100, max_queued_per_tenant=100)
    queue.observe_report(report)
    return queue


def ask(queue: FairQueue, tenant: str, count: int, **changes: Any) -> None:
    for i in range(count):
        fields: dict[str, Any] = {"weight": 1.0, "input_tokens": 10, "predicted_output_tokens": 5} | changes
        queue.push(Ticket(f"{tenant}{len(queue)}-{i}", 0, tenant, **fields), 0.0)


def granted(queue: FairQueue, now: float = 0.0) -> list[str]:
    tenants = []
    while (grant := queue.next_grant(now)) is not None:
        tenants.append(grant.request[0])
    return tenants


def test_a_waiting_tenant_gets_in_though_another_holds_every_slot() -> None:
    queue = make_queue(full({"a": SLOTS}, outstanding={"a": 5000.0}))
    ask(queue, "a", 3)
    ask(queue, "b", 1)
    assert granted(queue) == ["b"]


def test_fcfs_never_reclaims() -> None:
    queue = make_queue(full({"a": SLOTS}), "fcfs")
    ask(queue, "b", 1)
    assert granted(queue) == []


def test_at_most_two_preemptions_are_asked_for_until_the_engine_answers() -> None:
    queue = make_queue(full({"a": SLOTS}))
    ask(queue, "b", 5)
    assert granted(queue) == ["b", "b"]
    accepted = tuple((request, 0) for request in queue._in_flight.of_engine("e0"))
    queue.observe_report(full({"a": SLOTS, "b": 2}, step=1, accepted=accepted))
    assert granted(queue) == ["b", "b"]


def test_reclaim_stops_at_the_share() -> None:
    queue = make_queue(full({"a": SLOTS, "b": 4}))
    ask(queue, "b", 1)
    assert granted(queue) == [], "b holds four of eight: its half"
    queue = make_queue(full({"a": SLOTS, "b": 3}))
    ask(queue, "b", 2)
    assert granted(queue) == ["b"], "one of two: the other would be the fifth"


def test_weights_make_the_share() -> None:
    queue = make_queue(full({"a": SLOTS}, outstanding={"a": 5000.0}))
    ask(queue, "a", 1, weight=1.0)
    ask(queue, "b", 9, weight=3.0)
    count = 0
    for step in range(1, 9):
        count += granted(queue, now=10.0 * step).count("b")
        accepted = tuple((request, 0) for request in queue._in_flight.of_engine("e0"))
        queue.observe_report(
            full({"a": SLOTS, "b": count}, step=step, accepted=accepted, outstanding={"a": 5000.0})
        )
    assert count == 6, "three quarters of eight slots"


def test_nobody_takes_from_a_tenant_at_its_share() -> None:
    """Nine tenants for eight slots: each holds one at most, and the ninth waits for one to be free."""
    queue = make_queue(full({f"t{i}": 1 for i in range(SLOTS)}))
    ask(queue, "b", 1)
    assert granted(queue) == []
    ask(queue, "d", 5)
    ask(queue, "e", 5)
    assert granted(queue) == [], "nor do parts of many places make one"
    queue.observe_report(full({"t0": 2} | {f"t{i}": 1 for i in range(1, 7)}, step=1))
    assert granted(queue)[:1] == ["b"], "t0 has one to give"


def test_tenants_that_wait_count_as_active() -> None:
    """Three tenants have a third of the slots each, though two of them only wait."""
    queue = make_queue(full({"a": SLOTS, "b": 2}))
    ask(queue, "c", 1)
    ask(queue, "b", 2)
    assert granted(queue) == ["c"], "b's third would be the ninth part of 24: 2.67 of 8"


def test_pages_are_reclaimed_within_the_share() -> None:
    holder = {"free_pages": 1, "tenant_pages": {"a": 999}}
    queue = make_queue(full({"a": 2}, **holder))
    ask(queue, "b", 1, input_tokens=16 * 400)
    assert granted(queue) == ["b"], "401 of 1000 pages are within its half"
    queue = make_queue(full({"a": 2, "b": 1}, free_pages=1, tenant_pages={"a": 899, "b": 100}))
    ask(queue, "b", 1, input_tokens=16 * 400)
    assert granted(queue) == [], "501 are not"
    queue = make_queue(
        full({"a": 2, "c": 2, "d": 2}, free_pages=1, tenant_pages={"a": 333, "c": 333, "d": 333})
    )
    ask(queue, "b", 1, input_tokens=16 * 700)
    assert granted(queue) == [], "the others would fall below their own share"


def test_the_prefill_buffer_of_a_flood_is_not_in_the_way() -> None:
    """The engine divides prefill by weight: the flood's long prompts do not delay another's short one there."""
    flood = {"outstanding": {"a": 900.0}, "waiting_prefill_tokens": 900, "tenant_prefill_tokens": {"a": 900}}
    queue = make_queue(full({"a": 3}, **flood))
    ask(queue, "a", 1)
    assert granted(queue) == []
    ask(queue, "b", 20, input_tokens=30)
    assert granted(queue) == ["b"] * 4, "its half of 2 * 100 tokens is full after four"


def test_the_engine_with_most_to_give_is_chosen() -> None:
    queue = make_queue(full({"a": 5, "c": 3}))
    queue.observe_report(full({"a": SLOTS}, engine="e1"))
    ask(queue, "b", 1)
    grant = queue.next_grant(0.0)
    assert grant is not None and grant.engine == "e1"


def test_a_tenant_over_its_share_is_passed_over_and_not_waited_for() -> None:
    """The least served tenant holds its half of the slots, with requests that take long and cost little."""
    queue = make_queue(full({"a": 5, "b": 3}, outstanding={"b": 50.0}))
    ask(queue, "a", 1)
    ask(queue, "b", 1)
    assert granted(queue) == ["b"]
    queue = make_queue(full({"a": 5, "b": 3}, outstanding={"b": 50.0}))
    ask(queue, "a", 1)
    assert granted(queue) == [], "and has no right to more"


@pytest.mark.parametrize("draining", [True, False])
def test_a_draining_engine_is_not_reclaimed(draining: bool) -> None:
    queue = make_queue(full({"a": SLOTS}, draining=draining))
    ask(queue, "b", 1)
    assert granted(queue) == ([] if draining else ["b"])


def test_a_tenant_at_its_cap_on_pages_is_passed_over_while_another_one_waits() -> None:
    held = {"free_pages": 700, "tenant_pages": {"a": 240, "b": 60}}
    queue = make_queue(full({"a": 1, "b": 1}, outstanding={"b": 9000.0}, **held))
    ask(queue, "a", 1, input_tokens=16 * 40, kv_share=0.25)
    assert granted(queue) == ["a"], "nobody else waits"
    queue = make_queue(full({"a": 1, "b": 1}, outstanding={"b": 9000.0}, **held))
    ask(queue, "a", 2, input_tokens=16 * 40, kv_share=0.25)
    ask(queue, "b", 2, input_tokens=16 * 40)
    assert granted(queue)[0] == "b", "a is due, and would hold 281 of 1000 pages"
    queue = make_queue(full({"b": 1}, free_pages=940, outstanding={"b": 9000.0}, tenant_pages={"b": 60}))
    ask(queue, "a", 2, input_tokens=16 * 300, kv_share=0.25)
    ask(queue, "b", 2, input_tokens=16 * 40)
    assert granted(queue)[:2] == ["a", "b"], "its only request is bound by no cap"


def test_many_tenants_at_their_caps_hide_nobody() -> None:
    capped = {f"a{i}": 60 for i in range(16)}
    queue = make_queue(full(dict.fromkeys(capped, 1), max_num_seqs=64, free_pages=40, tenant_pages=capped))
    for tenant in capped:
        queue.push(Ticket(tenant, 0, tenant, 1.0, 16 * 20, 5, kv_share=0.0625), 0.0)
    queue.push(Ticket("z", 0, "z", 1.0, 16 * 20, 5), 0.0)
    assert granted(queue) == ["z"]


def test_pages_beyond_a_cap_come_back_to_a_tenant_that_has_its_share_by_weight() -> None:
    held = {"free_pages": 0, "tenant_pages": {"a": 400, "b": 600}}
    queue = make_queue(full({"a": 2, "b": 2}, **held))
    ask(queue, "b", 1, input_tokens=16 * 40)
    assert granted(queue) == [], "by weight it has more than its half"
    queue = make_queue(full({"a": 2, "b": 2}, outstanding={"a": 9000.0}, **held))
    ask(queue, "a", 1, input_tokens=16, kv_share=0.25)
    ask(queue, "b", 1, input_tokens=16 * 40)
    assert granted(queue) == ["b"]


def test_a_tiny_weight_is_not_lost_beside_a_huge_one() -> None:
    queue = make_queue(full({"c": SLOTS}))
    ask(queue, "a", 1, weight=1e-6)
    queue.push(Ticket("huge", 0, "b", 1e15, 10, 5), 0.0)
    queue.withdraw("huge", 0)
    assert granted(queue) == [], "c, of weight 1, has all slots, and a no right to one"
    queue.observe_report(full({}, step=1))
    assert granted(queue) == ["a"]
