"""Radix tree over page-aligned token runs: which KV pages already hold which prefix.

The idea is RadixAttention (Zheng et al., "SGLang", NeurIPS'24, section 3), at page granularity. Each namespace has a
root of its own, so a prefix is never found from another one. Runs are compared token by token, never by hash.

Invariants:
- a page in the tree belongs to exactly one node; nodes hold whole pages;
- a locked node has only locked ancestors, and is never evicted;
- pages held = evictable + locked, for the tree and for each root.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine_actor.kv.changes import PageChanges
from engine_actor.kv.eviction import pages_to_evict_from
from engine_actor.kv.node import Node, Root
from engine_actor.kv.pages import PagePool
from policies.page_hashes import chain_hashes

_TOKEN_BYTES = array("i").itemsize


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
        self._roots: dict[str, Root] = {}
        self._changes = PageChanges()
        self._time = 0
        self.evictable = 0
        self.locked = 0
        self.inserted_pages = 0
        self.evicted_pages: dict[str, int] = {}
        """Pages given up so far, per owner of the namespace they were in."""

    def root(self, namespace: str, owner: str = "", weight: float = 1.0) -> Root:
        """The root of a namespace. `owner` is the tenant its pages count for, "" once there were several; the last
        weight given holds."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace, owner)
        if root.owner != owner:
            root.owner = ""
        root.weight = weight
        root.used_at = self.inserted_pages
        return root

    def key(self, token_ids: Sequence[int], begin: int, end: int) -> bytes:
        """Pages `begin` to `end` of a token sequence as the tree compares them: int32 bytes."""
        return array("i", token_ids[begin * self._page_size : end * self._page_size]).tobytes()

    def match(self, node: Node, key: bytes) -> Match:
        """The longest run of whole pages below `node` that begins as `key` does: its pages and its last node.

        The result is valid until the next call that can evict; lock the node to keep it.
        """
        last, depth = self._walk(node, key)
        runs = []
        current = last
        while current is not node:
            runs.append(current.pages)
            assert current.parent is not None
            current = current.parent
        pages = [page for run in reversed(runs) for page in run]
        assert len(pages) * self._page_bytes == depth
        return Match(pages, last)

    def has_child(self, node: Node, first_page: bytes) -> bool:
        """Whether `match` below `node` would find anything for a key that begins with this page."""
        return first_page in node.children

    def insert(self, node: Node, key: bytes, pages: list[int]) -> Node:
        """Hand `pages`, which hold the tokens of `key`, over to the tree below `node`; returns their last node.

        `pages` is rewritten in place: where the tree already holds a page for the same prefix, that takes the place of
        the duplicate, which stays the caller's. A leaf that only the caller has locked grows in place; it is then
        returned itself and its lock covers the new pages.
        """
        self.inserted_pages += len(pages)
        root = node.root
        root.used_at = self.inserted_pages
        last, depth = self._walk(node, key)
        held = end = depth // self._page_bytes
        current = last
        while current is not node:
            begin = end - len(current.pages)
            pages[begin:end] = current.pages
            assert current.parent is not None
            current, end = current.parent, begin
        if held == len(pages):
            return last
        new = pages[held:]
        hashes = list(chain_hashes(last.hashes[-1], key[depth:], self._page_size))
        self._changes.note(hashes, True)
        if last is node and node.locks == 1 and not node.children and node is not root:
            node.key += key[depth:]
            node.pages += new
            node.hashes += hashes
            self.locked += len(new)
            root.locked += len(new)
            return node
        child = Node(root, key[depth:], new, last)
        child.hashes = hashes
        child.last_access = self._time
        last.children[key[depth : depth + self._page_bytes]] = child
        self.evictable += len(new)
        root.evictable += len(new)
        root.leaves.offer(child)
        return child

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Keep the node and its ancestors, as far as `above` (excluded), from eviction."""
        current: Node | None = node
        while current is not above and current is not None:
            if current.locks == 0:
                self._move(current, len(current.pages))
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.locks == 0:
                self._move(current, -len(current.pages))
                current.root.leaves.offer(current)
            current = current.parent
        self._drop_if_empty(node.root)

    def evict(self, count: int) -> int:
        """Free up to `count` unlocked pages; returns the number freed.

        Which namespace gives is decided by `pages_to_evict_from`; inside it the least recently used leaf goes first,
        tails first.
        """
        freed = 0
        while freed < count and self.evictable:
            root, most = pages_to_evict_from(self._roots.values(), self._pool.total, self.inserted_pages)
            got = self._evict_from(root, min(most, count - freed))
            assert got, "evictable pages are counted that no leaf holds"
            freed += got
        return freed

    def forget(self, namespace: str) -> None:
        """Evict everything of a namespace that is not locked."""
        root = self._roots.get(namespace)
        if root is not None:
            self._evict_from(root, root.evictable)

    def clear(self) -> int:
        """Evict everything that is not locked."""
        return self.evict(self.evictable)

    def take_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Hashes of the pages that have come and gone since the call before. The first call gives all as come."""
        return self._changes.take(self._roots.values())

    def check(self) -> None:
        """Walk the whole tree and compare it with the counters. Raises AssertionError: for tests and idle time."""
        seen: set[int] = set()
        totals = [0, 0]
        for root in self._roots.values():
            counts = [0, 0]
            stack: list[Node] = [root]
            while stack:
                node = stack.pop()
                assert len(node.key) == len(node.pages) * self._page_bytes and node.root is root
                assert node is root or len(node.hashes) == len(node.pages)
                assert not seen.intersection(node.pages)
                seen.update(node.pages)
                counts[node.locks > 0] += len(node.pages)
                for first, child in node.children.items():
                    assert child.parent is node and child.pages and child.key[: self._page_bytes] == first
                    assert child.locks == 0 or node.locks > 0
                    stack.append(child)
            assert counts == [root.evictable, root.locked], (counts, root.evictable, root.locked)
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
        assert totals == [self.evictable, self.locked], (totals, self.evictable, self.locked)

    def _move(self, node: Node, pages: int) -> None:
        """Count pages of a node as locked (as evictable, when negative)."""
        self.evictable -= pages
        self.locked += pages
        node.root.evictable -= pages
        node.root.locked += pages

    def _evict_from(self, root: Root, count: int) -> int:
        freed = 0
        while freed < count and (node := root.leaves.pop()) is not None:
            take = min(count - freed, len(node.pages))
            self._pool.release(node.pages[-take:])
            child_key = node.key[: self._page_bytes]
            self._changes.note(node.hashes[-take:], False)
            del node.pages[-take:]
            del node.hashes[-take:]
            node.key = node.key[: len(node.pages) * self._page_bytes]
            freed += take
            self.evictable -= take
            root.evictable -= take
            if node.pages:
                root.leaves.offer(node)
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[child_key]
            root.leaves.offer(parent)
        self.evicted_pages[root.owner] = self.evicted_pages.get(root.owner, 0) + freed
        self._drop_if_empty(root)
        return freed

    def _drop_if_empty(self, root: Root) -> None:
        if not root.children and not root.locks:
            self._roots.pop(root.namespace, None)

    def _walk(self, start: Node, key: bytes) -> tuple[Node, int]:
        """Deepest node below `start` whose path is a prefix of `key`, split where needed; the path's bytes."""
        size = self._page_bytes
        node, depth = start, 0
        self._time += 1
        while depth < len(key):
            child = node.children.get(key[depth : depth + size])
            if child is None:
                break
            common = self._common(child.key, key, depth)
            if common < len(child.key):
                child = self._split(child, common)
            child.last_access = self._time
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
        upper = Node(node.root, node.key[:length], node.pages[:count], parent)
        upper.hashes = node.hashes[:count]
        upper.locks = node.locks
        upper.last_access = node.last_access
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key = node.key[length:]
        node.pages = node.pages[count:]
        node.hashes = node.hashes[count:]
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper
