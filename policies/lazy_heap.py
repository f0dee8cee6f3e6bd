"""A priority queue whose keys move: O(log n) for a new key, amortised O(log n) for the smallest."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_SLACK = 64


class LazyHeap(Generic[Item]):
    """Items by key, smallest first. Items are hashable, keys are tuples that no two items share.

    A new key is pushed beside the old one, which is dropped when it comes to the top. Outdated entries are at
    most as many as the items, and a few.
    """

    def __init__(self) -> None:
        self._keys: dict[Item, tuple[Any, ...]] = {}
        self._heap: list[tuple[tuple[Any, ...], Item]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def set(self, item: Item, key: tuple[Any, ...]) -> None:
        """Add an item or move it."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Take an item out; one that is not there is ignored."""
        self._keys.pop(item, None)

    def first(self) -> Item | None:
        """The item with the smallest key; None when there is none."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def key(self, item: Item) -> tuple[Any, ...]:
        """Raises KeyError for an item that is not there."""
        return self._keys[item]

    def smallest(self, count: int) -> list[Item]:
        """Up to `count` items in order of their keys. O(count log n)."""
        found: dict[Item, tuple[Any, ...]] = {}
        while self._heap and len(found) < count:
            key, item = heapq.heappop(self._heap)
            if self._keys.get(item) == key:
                found[item] = key
        for item, key in found.items():
            heapq.heappush(self._heap, (key, item))
        return list(found)
