"""The KV pages of requests: page pool and prefix cache behind the few operations a scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.pages import PagePool
from engine_actor.kv.radix import Node, RadixCache


@dataclass
class SequencePages:
    """Page table of one request. The first `shared` pages belong to the prefix cache, locked through `node`."""

    namespace: str
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    shared: int = 0


class KVCache:
    """Hands pages to requests and keeps finished prefixes.

    Invariant: free + evictable + locked + private = total, where private pages are those of requests beyond their
    shared prefix. With no live request locked and private are zero.
    """

    def __init__(self, num_pages: int, *, prefix_caching: bool = True) -> None:
        self._pool = PagePool(num_pages)
        self._tree = RadixCache(self._pool, PAGE_SIZE)
        self._prefix_caching = prefix_caching
        self.total = self._pool.total

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return self._pool.free

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones and cached ones nobody uses."""
        return self._pool.free + self._tree.evictable

    @property
    def evictable(self) -> int:
        return self._tree.evictable

    @property
    def locked(self) -> int:
        return self._tree.locked

    @property
    def evicted_pages(self) -> int:
        """Cached pages given up so far."""
        return self._tree.evicted_pages

    def open(self, namespace: str, token_ids: list[int]) -> SequencePages:
        """Start a page table with the longest cached prefix, locked. At least the last token stays to be computed."""
        table = SequencePages(namespace)
        if self._prefix_caching:
            match = self._tree.match(namespace, token_ids, (len(token_ids) - 1) // PAGE_SIZE)
            self._tree.lock(match.node)
            table.pages, table.node, table.shared = list(match.pages), match.node, len(match.pages)
        return table

    def reserve(self, table: SequencePages, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` positions, evicting cached pages if need be. False: not enough pages."""
        needed = pages_for(num_tokens) - len(table.pages)
        if needed <= 0:
            return True
        if needed > self._pool.free:
            if needed > self.available:
                return False
            self._tree.evict(needed - self._pool.free)
        table.pages.extend(self._pool.allocate(needed))
        return True

    def share(self, table: SequencePages, token_ids: list[int], computed: int) -> None:
        """Put the full pages of the `computed` positions into the prefix cache; the table keeps them locked.

        Where another request has cached the same prefix meanwhile, the table is pointed at those pages and its own
        duplicates are freed.
        """
        count = computed // PAGE_SIZE
        if not self._prefix_caching or count <= table.shared:
            return
        node = self._tree.insert(table.namespace, token_ids, table.pages, count)
        self._tree.lock(node)
        if table.node is not None:
            self._tree.unlock(table.node)
        table.node, table.shared = node, count

    def close(self, table: SequencePages) -> None:
        """Give up the table: private pages are freed, shared ones stay cached. Safe to call twice."""
        self._pool.release(table.pages[table.shared :])
        if table.node is not None:
            self._tree.unlock(table.node)
        table.pages, table.node, table.shared = [], None, 0

    def clear(self) -> None:
        """Forget every cached prefix that no live request uses."""
        self._tree.clear()

    def check_idle(self) -> None:
        """With no live request, every page is free or evictable. Raises AssertionError otherwise."""
        self._tree.check()
        assert self.locked == 0 and self.free + self.evictable == self.total, (
            f"KV pages lost: free {self.free} + evictable {self.evictable} + locked {self.locked} of {self.total}"
        )


def pages_for(num_tokens: int) -> int:
    """Pages that `num_tokens` positions take."""
    return -(-num_tokens // PAGE_SIZE)
