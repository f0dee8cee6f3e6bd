"""Preemption victim and peak memory estimate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.memory import VictimCandidate, choose_victim, ends_crowd, estimate_peak_tokens

CANDIDATES = st.lists(
    st.builds(
        VictimCandidate,
        id=st.just(0),
        tenant=st.sampled_from("abc"),
        share=st.sampled_from([0.5, 1.0, 4.0]),
        pages=st.integers(0, 50),
        uncached_tokens=st.integers(0, 500),
        arrival_order=st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda candidate: candidate.arrival_order,
)


def candidate(order: int, tenant: str = "a", **changes: float) -> VictimCandidate:
    fields = {"share": 1.0, "pages": 10, "uncached_tokens": 100} | changes
    return VictimCandidate(id=order, tenant=tenant, arrival_order=order, **fields)  # type: ignore[arg-type]


def test_the_tenant_furthest_over_its_share_gives_way() -> None:
    candidates = [
        candidate(0, "a", pages=30),
        candidate(1, "b", share=4.0, pages=60),
        candidate(2, "a", pages=5),
        candidate(3, "b", share=4.0, pages=40),
    ]
    # a holds 35 pages per share, b 25, though b holds more pages.
    assert choose_victim(candidates).id == 2


def test_fewest_tokens_to_recompute_then_the_newest() -> None:
    candidates = [
        candidate(0, uncached_tokens=1),
        candidate(1, uncached_tokens=50),
        candidate(2, uncached_tokens=20),
        candidate(3, uncached_tokens=20),
    ]
    assert choose_victim(candidates).id == 3


def test_the_oldest_is_spared_even_if_its_tenant_is_furthest_over() -> None:
    assert choose_victim([candidate(0, "a", pages=1000), candidate(1, "b", pages=1)]).id == 1


def test_a_lone_candidate_is_taken_and_none_is_an_error() -> None:
    assert choose_victim([candidate(7)]).id == 7
    with pytest.raises(ValueError, match="no candidate"):
        choose_victim([])


@given(CANDIDATES)
def test_victim_rule(candidates: list[VictimCandidate]) -> None:
    victim = choose_victim(candidates)
    assert victim in candidates
    assert choose_victim(candidates[::-1]) is victim, "the order of the list decides nothing"
    if len(candidates) > 1:
        assert victim.arrival_order > min(c.arrival_order for c in candidates)
    peers = [c for c in candidates if c.tenant == victim.tenant and c is not victim]
    oldest = min(c.arrival_order for c in candidates)
    assert all(
        victim.uncached_tokens <= peer.uncached_tokens for peer in peers if peer.arrival_order != oldest
    )


def test_preemption_cannot_go_in_circles() -> None:
    """Six requests of 9 pages in a pool of 10: each ends, since the oldest never gives way."""
    pages_in_all, need = 10, 9
    live = {order: 0 for order in range(6)}
    ended = []
    for _ in range(1000):
        for order in sorted(live):
            while order in live and sum(live.values()) >= pages_in_all:
                holders = [
                    candidate(o, "ab"[o % 2], pages=p, uncached_tokens=p) for o, p in live.items() if p
                ]
                live[choose_victim(holders).id] = 0
            live[order] += 1
            if live[order] == need:
                ended.append(order)
                del live[order]
        if not live:
            break
    assert ended == list(range(6))


def peak_by_steps(held: list[int], remaining: list[int]) -> int:
    """Every request grows by a token a step and leaves after its last one."""
    return max(
        (
            sum(h + step for h, r in zip(held, remaining, strict=True) if r >= step)
            for step in range(max(remaining, default=0) + 1)
        ),
        default=0,
    )


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=25))
def test_peak_equals_the_peak_of_a_step_by_step_run(batch: list[tuple[int, int]]) -> None:
    held, remaining = [h for h, _ in batch], [r for _, r in batch]
    assert estimate_peak_tokens(held, remaining) == peak_by_steps(held, remaining)


def test_peak_by_hand() -> None:
    assert estimate_peak_tokens([], []) == 0
    assert estimate_peak_tokens([100], [20]) == 120
    # After 5 steps 105 + 15; after 50 steps the second one alone: 60.
    assert estimate_peak_tokens([100, 10], [5, 50]) == 120


@pytest.mark.parametrize(("held", "remaining"), [([1, 2], [1]), ([[1]], [[1]]), ([-1], [1]), ([1], [-1])])
def test_peak_refuses_bad_arrays(held: list[int], remaining: list[int]) -> None:
    with pytest.raises(ValueError):
        estimate_peak_tokens(held, remaining)


def crowd(remaining: list[int], *, own_output: int = 64, own_remaining: int = 64, limit: int = 100) -> bool:
    """Whether one more would end together with requests of 64 tokens in and 64 out; memory for 20 of them."""
    return ends_crowd(
        [128] * len(remaining),
        [64] * len(remaining),
        remaining,
        own_output=own_output,
        own_remaining=own_remaining,
        kv_tokens=20 * 96,
        limit=limit,
    )


def test_a_request_waits_behind_those_that_started_just_now_and_not_behind_others() -> None:
    assert crowd([64] * 12), "all of them end together"
    assert crowd([64] * 7 + [10] * 5) and not crowd([64] * 6 + [10] * 5), (
        "half as many again as evenly spread"
    )
    assert not crowd(list(range(3, 64, 3))), "spread evenly"
    assert not crowd([40] * 12), "when they have run for a quarter of their time the next ones start"


def test_ends_do_not_matter_below_half_of_the_memory_or_where_slots_are_what_lacks() -> None:
    assert not crowd([64] * 9)
    assert not crowd([64] * 12, limit=20)
    assert not ends_crowd([], [], [], own_output=1, own_remaining=1, kv_tokens=100, limit=10)


def test_a_request_that_has_outlived_its_prediction_holds_up_nobody() -> None:
    assert not crowd([0] * 12, own_output=64, own_remaining=4)
    assert not crowd([64] * 12, own_output=2, own_remaining=2), "nobody else ends when it does"
    assert not crowd([64] * 12, own_output=0, own_remaining=0)
