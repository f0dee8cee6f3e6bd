"""The KV pages of requests: page pool and prefix cache behind the few operations a scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.node import Node
from engine_actor.kv.pages import PagePool
from engine_actor.kv.radix import RadixCache

_EVICTION_BATCH = 256
"""Eviction frees at least this part (1/n) of the pool at once: a full pool is not searched for every page."""


@dataclass(slots=True)
class SequencePages:
    """Page table of one request. The first `shared` pages belong to the prefix cache, locked through `node`."""

    namespace: str
    node: Node | None = None
    pages: list[int] = field(default_factory=list)
    shared: int = 0


class KVCache:
    """Hands pages to requests and keeps finished prefixes.

    Without `prefix_caching` a prefix is kept only for the request that was preempted and will compute the rest.

    What is given up while `in_flight` is set may be named by a step that has not ended: it is neither freed nor
    unlocked before the next `settle`.

    Invariant: free + evictable + locked + private + given up = total, where private pages are those of requests beyond
    their shared prefix. With no live request and no step in flight the last three are zero.
    """

    def __init__(self, num_pages: int, *, prefix_caching: bool = True) -> None:
        self._pool = PagePool(num_pages)
        self._tree = RadixCache(self._pool, PAGE_SIZE)
        self.prefix_caching = prefix_caching
        self.total = self._pool.total
        self.in_flight = False
        self._given_up: list[tuple[list[int], Node | None]] = []

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
        return sum(self._tree.evicted_pages.values())

    @property
    def evicted_by_owner(self) -> dict[str, int]:
        """Cached pages given up so far, per tenant whose namespace they were in."""
        return self._tree.evicted_pages

    def open(
        self, namespace: str, token_ids: list[int], owner: str = "", weight: float = 1.0
    ) -> SequencePages:
        """Start a page table with the longest cached prefix, locked. At least the last token stays to be computed.

        `owner` and `weight` say for whom the pages of the namespace count when cached pages are given up.
        """
        root = self._tree.root(namespace, owner, weight)
        self._tree.lock(root)
        table = SequencePages(namespace, root)
        self.extend(table, token_ids)
        return table

    def extend(self, table: SequencePages, token_ids: list[int]) -> int:
        """Take pages that the prefix cache holds beyond the shared ones; returns how many the table has gained.

        Private pages of the table, which held a part of the same tokens, are freed. At least the last token stays to
        be computed.
        """
        node, begin, end = table.node, table.shared, (len(token_ids) - 1) // PAGE_SIZE
        assert node is not None
        if begin >= end or not node.children:
            return 0
        if not self._tree.has_child(node, self._tree.key(token_ids, begin, begin + 1)):
            return 0
        match = self._tree.match(node, self._tree.key(token_ids, begin, end))
        self._tree.lock(match.node, above=node)
        self._give_up(table.pages[begin:])
        table.pages[begin:] = match.pages
        table.node, table.shared = match.node, begin + len(match.pages)
        return len(match.pages)

    def next_page(self, table: SequencePages, token_ids: list[int]) -> tuple[str, int, bytes] | None:
        """What the page behind the shared ones will hold, as a key: equal for tables whose whole prefix is equal.

        None when that page will not be full before the last token.
        """
        begin = table.shared
        if (begin + 1) * PAGE_SIZE >= len(token_ids):
            return None
        previous = table.pages[begin - 1] if begin else 0
        return table.namespace, previous, self._tree.key(token_ids, begin, begin + 1)

    def reserve(self, table: SequencePages, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` positions, evicting cached pages if need be. False: not enough pages."""
        needed = pages_for(num_tokens) - len(table.pages)
        if needed <= 0:
            return True
        if needed > self._pool.free:
            if needed > self.available:
                return False
            self._tree.evict(max(needed - self._pool.free, self.total // _EVICTION_BATCH))
        table.pages += self._pool.allocate(needed)
        return True

    def share(self, table: SequencePages, token_ids: list[int], computed: int) -> bool:
        """Put the full pages of the `computed` positions into the prefix cache; the table keeps them locked.

        Where another request has cached the same prefix meanwhile, the table is pointed at those pages, its own
        duplicates are freed, and the answer is True: the table has changed.
        """
        begin, count = table.shared, computed // PAGE_SIZE
        if count <= begin:
            return False
        assert table.node is not None
        own = table.pages[begin:count]
        pages = own.copy()
        node = self._tree.insert(table.node, self._tree.key(token_ids, begin, count), pages)
        if node is not table.node:
            self._tree.lock(node, above=table.node)
        table.pages[begin:count] = pages
        table.node, table.shared = node, count
        duplicates = [page for page, kept in zip(own, pages, strict=True) if page != kept]
        self._give_up(duplicates)
        return bool(duplicates)

    def close(self, table: SequencePages, *, used: bool = True) -> None:
        """Give up the table: private pages are freed, shared ones stay cached. Safe to call twice.

        `used` False: no step was ever told of the table.
        """
        self._give_up(table.pages[table.shared :], table.node, at_once=not used)
        table.pages, table.node, table.shared = [], None, 0

    def settle(self, *, in_flight: bool) -> None:
        """A step has ended, so that nobody needs what was given up before; `in_flight`: a later one has not."""
        self.in_flight = False
        given_up, self._given_up = self._given_up, []
        for pages, node in given_up:
            self._give_up(pages, node)
        self.in_flight = in_flight

    def _give_up(self, pages: list[int], node: Node | None = None, *, at_once: bool = False) -> None:
        """Free pages and unlock a node, once no step in flight may use them."""
        if self.in_flight and not at_once:
            self._given_up.append((pages, node))
            return
        self._pool.release(pages)
        if node is not None:
            self._tree.unlock(node)

    def forget(self, namespace: str) -> None:
        """Give up the cached pages of a namespace that no live request uses."""
        self._tree.forget(namespace)

    def take_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Hashes of cached pages that have come and gone since the call before. The first call gives all as come."""
        return self._tree.take_changes()

    def clear(self) -> None:
        """Forget every cached prefix that no live request uses."""
        self._tree.clear()

    def check(self, private: int = 0) -> None:
        """Compare the accounts with each other; `private` pages are outside. Raises AssertionError."""
        self._tree.check()
        given_up = sum(len(pages) for pages, _ in self._given_up)
        assert self.free + self.evictable + self.locked + private + given_up == self.total, (
            f"KV pages lost: free {self.free} + evictable {self.evictable} + locked {self.locked} + "
            f"private {private} + given up {given_up} of {self.total}"
        )

    def check_idle(self) -> None:
        """With no live request, every page is free or evictable. Raises AssertionError otherwise."""
        assert self.locked == 0, f"{self.locked} KV pages are locked with no live request"
        self.check()


def pages_for(num_tokens: int) -> int:
    """Pages that `num_tokens` positions take."""
    return -(-num_tokens // PAGE_SIZE)
