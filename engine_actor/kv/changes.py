"""Which named pages of the prefix cache have come and gone, for those who choose an engine by its cache."""

from __future__ import annotations

from collections.abc import Iterable

from engine_actor.kv.node import Node


class PageChanges:
    """Notes changes from the first `take` on, so that nothing piles up where nobody asks."""

    def __init__(self) -> None:
        self._cached: dict[int, bool] | None = None  # by page hash

    def note(self, hashes: Iterable[int], cached: bool) -> None:
        """Pages have come into the tree, or left it."""
        if self._cached is not None:
            self._cached.update(dict.fromkeys(hashes, cached))

    def take(self, roots: Iterable[Node]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Hashes of the pages that have come and gone since the call before. The first call gives all as come."""
        if self._cached is None:
            self._cached = {}
            stack = [child for root in roots for child in root.children.values()]
            while stack:
                node = stack.pop()
                self.note(node.hashes, True)
                stack.extend(node.children.values())
        changes, self._cached = self._cached, {}
        added = tuple(page for page, cached in changes.items() if cached)
        return added, tuple(page for page, cached in changes.items() if not cached)
