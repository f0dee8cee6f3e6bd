"""A priority queue whose keys move: a key that rises costs nothing until its item comes to the top."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[Any, ...]

_SLACK = 64


class LazyHeap(Generic[Item]):
    """Items by key, smallest first. `key_of` gives an item's key of the moment, None when it is to leave.

    No two items share a key. The owner calls `changed` for every item whose key may have fallen, and for new ones;
    then `first` and `smallest` are exact. Amortised O(log n).

    Invariant: for each item with a key there is an entry that is not above it; `_lowest` holds the lowest one.
    """

    def __init__(self, key_of: Callable[[Item], Key | None]) -> None:
        self._key_of = key_of
        self._lowest: dict[Item, Key] = {}
        self._heap: list[tuple[Key, Item]] = []

    def __contains__(self, item: Item) -> bool:
        """The item had a key when it was last looked at."""
        return item in self._lowest

    def changed(self, item: Item) -> None:
        """The item's key may have fallen, or the item is new."""
        key = self._key_of(item)
        if key is None:
            return
        lowest = self._lowest.get(item)
        if lowest is None or key < lowest:
            self._push(item, key)
            if len(self._heap) > 2 * len(self._lowest) + _SLACK:
                self._heap = [(key, item) for item, key in self._lowest.items()]
                heapq.heapify(self._heap)

    def first(self) -> Item | None:
        """The item with the smallest key; None when there is none."""
        while self._heap:
            key, item = self._heap[0]
            if self._lowest.get(item) == key:
                now = self._key_of(item)
                if now == key:
                    return item
                del self._lowest[item]
                if now is not None:
                    heapq.heapreplace(self._heap, (now, item))
                    self._lowest[item] = now
                    continue
            heapq.heappop(self._heap)
        return None

    def smallest(self, count: int) -> list[Item]:
        """Up to `count` items in order of their keys. O(count log n)."""
        found: list[Item] = []
        while len(found) < count and (item := self.first()) is not None:
            found.append(item)
            del self._lowest[item]
            heapq.heappop(self._heap)
        for item in found:
            key = self._key_of(item)
            assert key is not None
            self._push(item, key)
        return found

    def _push(self, item: Item, key: Key) -> None:
        self._lowest[item] = key
        heapq.heappush(self._heap, (key, item))
