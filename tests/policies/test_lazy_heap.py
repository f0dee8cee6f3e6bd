"""The heap with moving keys against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.lazy_heap import LazyHeap

ITEMS = st.integers(0, 5)
STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "remove", "first", "smallest"]), ITEMS, st.integers(0, 8)), max_size=300
)


@given(STEPS)
def test_order_is_exact_whatever_moves(steps: list[tuple[str, int, int]]) -> None:
    keys: dict[int, tuple[int, int]] = {}
    heap = LazyHeap(keys.get)
    for what, item, value in steps:
        if what == "set":
            rises = item in keys and (value, item) >= keys[item]
            keys[item] = (value, item)
            if not rises:  # a key that rises need not be told
                heap.changed(item)
        elif what == "remove":
            keys.pop(item, None)
        elif what == "first":
            assert heap.first() == min(keys, key=keys.__getitem__, default=None)
        else:
            assert heap.smallest(value) == sorted(keys, key=keys.__getitem__)[:value]
    assert heap.smallest(10) == sorted(keys, key=keys.__getitem__)


def test_outdated_entries_are_few() -> None:
    keys = {item: (10**6, item) for item in range(10)}
    heap = LazyHeap(keys.get)
    for round_ in range(10_000):
        item = round_ % 10
        keys[item] = (10**6 - round_, item)
        heap.changed(item)
    assert len(heap._heap) <= 100
