"""Shares of slots and pages: whose turn, and from whom room is taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.engine_shares import EngineShares, TenantUse

SLOTS, PAGES = 8, 80


def shares(**uses: TenantUse) -> EngineShares:
    return EngineShares(uses, SLOTS, PAGES)


def test_the_smallest_dominant_share_per_weight_is_next_and_the_oldest_of_equals() -> None:
    few_slots_many_pages = TenantUse(1.0, 1, 40, head_order=1)
    many_slots_few_pages = TenantUse(1.0, 3, 10, head_order=2)
    assert shares(a=few_slots_many_pages, b=many_slots_few_pages).next_waiting() == "b"
    assert shares(a=few_slots_many_pages, b=replace(many_slots_few_pages, weight=0.5)).next_waiting() == "a"
    assert shares(a=TenantUse(1, 1, 9, 5), b=TenantUse(1, 1, 9, 4)).next_waiting() == "b"
    assert shares(a=TenantUse(1, 0, 0), b=TenantUse(1, 8, 80, 4)).next_waiting() == "b"
    assert shares(a=TenantUse(1, 0, 0)).next_waiting() is None


def test_a_head_over_its_own_page_share_is_passed_over_unless_nothing_of_its_tenant_runs() -> None:
    giant = TenantUse(1.0, 1, 10, head_order=1, head_pages=50)
    other = TenantUse(1.0, 3, 30, head_order=2, head_pages=2)
    assert shares(a=giant, b=other).next_waiting() == "b"
    assert shares(a=replace(giant, running=0, pages=0), b=other).next_waiting() == "a"
    assert shares(a=giant, b=replace(other, head_order=None)).next_waiting() == "a", "alone it may borrow"


def test_room_is_taken_from_the_tenant_furthest_over_its_share() -> None:
    head = TenantUse(1.0, 0, 0, head_order=9, head_pages=2)
    uses = {"a": head, "b": TenantUse(1.0, 3, 30), "c": TenantUse(1.0, 5, 20)}
    assert shares(**uses).reclaim_from("a", slot=True) == "c"
    assert shares(**uses).reclaim_from("a", slot=False) == "b"


def test_nothing_is_taken_from_a_last_running_request_or_for_a_tenant_at_its_share() -> None:
    head = TenantUse(1.0, 0, 0, head_order=9, head_pages=2)
    assert shares(a=head, b=TenantUse(1.0, 1, 80)).reclaim_from("a", slot=False) is None
    half = TenantUse(1.0, 4, 10, head_order=9, head_pages=2)
    assert shares(a=half, b=TenantUse(1.0, 4, 70)).reclaim_from("a", slot=True) is None
    assert shares(a=replace(half, running=3), b=TenantUse(1.0, 5, 70)).reclaim_from("a", slot=True) == "b"
    wide = replace(half, running=1, pages=39)
    assert shares(a=wide, b=TenantUse(1.0, 4, 41)).reclaim_from("a", slot=False) is None


def test_weights_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        shares(a=TenantUse(0.0, 1, 1))


def test_a_tenant_at_its_cap_is_passed_over_while_another_one_waits() -> None:
    capped = TenantUse(4.0, 1, 18, head_order=1, head_pages=4, kv_share=0.25)
    other = TenantUse(1.0, 3, 30, head_order=2, head_pages=20)
    assert shares(a=capped, b=other).next_waiting() == "b", "22 of 80 pages would be more than a quarter"
    assert shares(a=replace(capped, head_pages=2), b=other).next_waiting() == "a"
    assert shares(a=replace(capped, running=0, pages=0, head_pages=70), b=other).next_waiting() == "a"
    assert shares(a=capped, b=replace(other, head_order=None)).next_waiting() == "a", "nobody else waits"
    assert shares(a=capped, b=replace(other, kv_share=0.8, pages=60)).next_waiting() is None


def test_caps_of_the_live_tenants_are_raised_until_they_make_up_the_whole() -> None:
    half = TenantUse(1.0, 1, 10, kv_share=0.2)
    assert shares(a=half, b=half).page_cap("a") == 40
    assert shares(a=half, b=replace(half, kv_share=0.6)).page_cap("b") == 60
    assert shares(a=half, b=TenantUse(1.0, 1, 10)).page_cap("a") == 16
    assert shares(a=half, b=TenantUse(1.0, 1, 10)).page_share("b") == 40, "what b is entitled to is by weight"
    assert shares(a=half, b=TenantUse(1.0, 1, 10)).page_share("a") == 16, "and for a no more than its cap"


def test_pages_beyond_a_cap_are_taken_back_for_a_tenant_below_its_own() -> None:
    capped = TenantUse(1.0, 5, 50, kv_share=0.25)
    other = TenantUse(1.0, 5, 38, head_order=2, head_pages=10)
    assert shares(a=capped, b=other).reclaim_from("b", slot=False) == "a"
    assert shares(a=capped, b=other).reclaim_from("b", slot=True) is None, "b has its half of the slots"
    assert shares(a=replace(capped, pages=20), b=other).reclaim_from("b", slot=False) is None
    both = {"a": replace(capped, kv_share=0.5), "b": replace(other, kv_share=0.5)}
    assert shares(**both).reclaim_from("b", slot=False) is None, "48 of 80 pages are more than its own cap"


uses = st.builds(
    TenantUse,
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    running=st.integers(0, 8),
    pages=st.integers(0, 80),
    head_order=st.none() | st.integers(0, 99),
    head_pages=st.integers(1, 80),
    kv_share=st.sampled_from([1.0, 0.25, 0.6]),
)


@given(st.dictionaries(st.sampled_from("abcd"), uses, min_size=2), st.booleans(), st.integers(1, 80))
def test_who_gave_room_may_not_take_it_back(all_uses: dict[str, TenantUse], slot: bool, pages: int) -> None:
    for name, use in all_uses.items():
        if use.head_order is None:
            continue
        giver = EngineShares(all_uses, SLOTS, PAGES).reclaim_from(name, slot=slot)
        if giver is None:
            continue
        gave = all_uses[giver]
        pages = min(pages, gave.pages)
        after = dict(all_uses)
        after[giver] = replace(
            gave, running=gave.running - 1, pages=gave.pages - pages, head_order=0, head_pages=pages
        )
        later = EngineShares(after, SLOTS, PAGES)
        assert later.reclaim_from(giver, slot=True) is None
        other = later.reclaim_from(giver, slot=False)
        # From a third tenant alone, and only what that one has to give up anyhow.
        assert other is None or (other != name and after[other].pages > later.page_cap(other))
