"""Radix tree over page-aligned token runs: which KV pages already hold which prefix.

The idea is RadixAttention (Zheng et al., "SGLang", NeurIPS'24, section 3), at page granularity. Each namespace has a
root of its own, so a prefix is never found from another one. Runs are compared token by token, never by hash.

Invariants:
- a page in the tree belongs to exactly one node; nodes hold whole pages;
- a locked node has only locked ancestors, and is never evicted;
- pages held = evictable + locked.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine_actor.kv.pages import PagePool

_TOKEN_BYTES = array("i").itemsize


class Node:
    """A run of whole pages. `key` is the run's token ids as int32 bytes."""

    __slots__ = ("children", "key", "last_access", "locks", "namespace", "offered", "pages", "parent")

    def __init__(self, namespace: str, key: bytes, pages: list[int], parent: Node | None) -> None:
        self.namespace = namespace
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_access = 0
        self.offered = False  # has an entry in the eviction heap


@dataclass(frozen=True)
class Match:
    """Pages of the longest cached prefix, and the node to lock while they are in use."""

    pages: list[int]
    node: Node


class RadixCache:
    """Prefix cache over a page pool. Not thread-safe: the scheduler is its only user."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._time = 0
        # Leaves that may be evicted, least recently used first. An entry is checked again when it is popped.
        self._leaves: list[tuple[int, int, Node]] = []
        self.evictable = 0
        self.locked = 0
        self.evicted_pages = 0

    def match(self, namespace: str, token_ids: Sequence[int], max_pages: int) -> Match:
        """Longest prefix of `token_ids` held for `namespace`, at most `max_pages` long.

        The result is valid until the next call that can evict; lock the node to keep it.
        """
        root = self._root(namespace)
        key = array("i", token_ids[: max_pages * self._page_size]).tobytes()
        node, depth = self._walk(root, key)
        pages: list[int] = []
        current = node
        runs = []
        while current.parent is not None:
            runs.append(current.pages)
            current = current.parent
        for run in reversed(runs):
            pages.extend(run)
        assert len(pages) * self._page_bytes == depth
        return Match(pages, node)

    def insert(self, namespace: str, token_ids: Sequence[int], pages: list[int], count: int) -> Node:
        """Hand the first `count` pages of a request over to the tree and return the node of the last one.

        `pages` is the request's own table and is rewritten in place: where the tree already holds a page for the
        same prefix, the request's duplicate is freed and the tree's page takes its place.
        """
        root = self._root(namespace)
        key = array("i", token_ids[: count * self._page_size]).tobytes()
        node, depth = self._walk(root, key)
        held = depth // self._page_bytes
        current, end = node, held
        while current.parent is not None:
            begin = end - len(current.pages)
            for offset, page in enumerate(current.pages):
                own = pages[begin + offset]
                if own != page:
                    self._pool.release((own,))
                    pages[begin + offset] = page
            current, end = current.parent, begin
        if held < count:
            child = Node(namespace, key[depth:], pages[held:count], node)
            child.last_access = self._tick()
            node.children[key[depth : depth + self._page_bytes]] = child
            self.evictable += count - held
            self._offer(child)
            node = child
        return node

    def lock(self, node: Node) -> None:
        """Keep the node and its ancestors from eviction."""
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                self.evictable -= len(current.pages)
                self.locked += len(current.pages)
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.locks == 0:
                self.evictable += len(current.pages)
                self.locked -= len(current.pages)
                self._offer(current)
            current = current.parent

    def evict(self, count: int) -> int:
        """Free up to `count` unlocked pages, least recently used leaf first, tails first. Returns the number freed."""
        freed = 0
        while freed < count and self._leaves:
            access, _, node = heapq.heappop(self._leaves)
            node.offered = False
            if node.locks or node.children or not node.pages:
                continue
            if access != node.last_access:
                self._offer(node)
                continue
            take = min(count - freed, len(node.pages))
            self._pool.release(node.pages[-take:])
            child_key = node.key[: self._page_bytes]
            del node.pages[-take:]
            node.key = node.key[: len(node.pages) * self._page_bytes]
            freed += take
            self.evictable -= take
            self.evicted_pages += take
            if node.pages:
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[child_key]
            if parent.parent is not None:
                self._offer(parent)
            elif not parent.children and not parent.locks:
                del self._roots[parent.namespace]
        return freed

    def clear(self) -> int:
        """Evict everything that is not locked."""
        return self.evict(self.evictable)

    def check(self) -> None:
        """Walk the whole tree and compare it with the counters. Raises AssertionError: for tests and idle time."""
        evictable = locked = 0
        seen: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert len(node.key) == len(node.pages) * self._page_bytes
            assert not seen.intersection(node.pages)
            seen.update(node.pages)
            if node.locks:
                locked += len(node.pages)
            else:
                evictable += len(node.pages)
            for first, child in node.children.items():
                assert child.parent is node and child.pages and child.key[: self._page_bytes] == first
                assert child.locks == 0 or node.locks > 0
                stack.append(child)
        assert (evictable, locked) == (self.evictable, self.locked), (
            evictable,
            locked,
            self.evictable,
            self.locked,
        )

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, b"", [], None)
        return root

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def _offer(self, node: Node) -> None:
        if node.parent is not None and not (node.offered or node.locks or node.children):
            node.offered = True
            heapq.heappush(self._leaves, (node.last_access, id(node), node))

    def _walk(self, root: Node, key: bytes) -> tuple[Node, int]:
        """Deepest node whose path is a prefix of `key`, split where needed; and the length of that path in bytes."""
        size = self._page_bytes
        node, depth = root, 0
        now = self._tick()
        while depth < len(key):
            child = node.children.get(key[depth : depth + size])
            if child is None:
                break
            common = self._common(child.key, key, depth)
            if common < len(child.key):
                child = self._split(child, common)
            child.last_access = now
            node, depth = child, depth + common
        return node, depth

    def _common(self, run: bytes, key: bytes, depth: int) -> int:
        if key.startswith(run, depth):
            return len(run)
        size = self._page_bytes
        common = size
        while (
            common < len(run) and run[common : common + size] == key[depth + common : depth + common + size]
        ):
            common += size
        return common

    def _split(self, node: Node, length: int) -> Node:
        """Cut the first `length` bytes of a node off into a new parent and return that parent.

        The lower part keeps its identity, so a lock held on it stays valid.
        """
        parent = node.parent
        assert parent is not None
        count = length // self._page_bytes
        upper = Node(node.namespace, node.key[:length], node.pages[:count], parent)
        upper.locks = node.locks
        upper.last_access = node.last_access
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key = node.key[length:]
        node.pages = node.pages[count:]
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper
