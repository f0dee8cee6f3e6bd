"""Nodes of the prefix tree: runs of whole pages, and the order in which unused ones are given up."""

from __future__ import annotations

import heapq

from policies.page_hashes import root_hash


class Node:
    """A run of whole pages. `key` is the run's token ids as int32 bytes, `hashes` names each of the pages."""

    __slots__ = ("children", "hashes", "key", "last_access", "locks", "offered", "pages", "parent", "root")

    def __init__(self, root: Root | None, key: bytes, pages: list[int], parent: Node | None) -> None:
        self.root: Root = root if root is not None else self  # type: ignore[assignment]
        self.key = key
        self.pages = pages
        self.hashes: list[int] = []
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_access = 0
        self.offered = False  # has an entry in the eviction queue


class Root(Node):
    """The empty run that every prefix of a namespace begins with; counts the pages of all of them.

    Its one hash is what those of the pages are chained to.
    `used_at` is the number of pages the whole tree had taken in when the namespace was used last.
    """

    __slots__ = ("evictable", "leaves", "locked", "namespace", "owner", "used_at", "weight")

    def __init__(self, namespace: str, owner: str) -> None:
        super().__init__(None, b"", [], None)
        self.hashes = [root_hash(namespace)]
        self.namespace = namespace
        self.owner = owner
        self.weight = 1.0
        self.evictable = 0
        self.locked = 0
        self.used_at = 0
        self.leaves = LeafQueue()


class LeafQueue:
    """Leaves that may be evicted, least recently used first. An entry is checked again when it is taken."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Enter a node if it is an unlocked leaf and not entered yet."""
        if not (node.offered or node.locks or node.children or node.parent is None):
            node.offered = True
            heapq.heappush(self._heap, (node.last_access, id(node), node))

    def oldest(self) -> Node | None:
        """The leaf that was not used for longest, None without one."""
        while self._heap:
            access, _, node = self._heap[0]
            if node.locks or node.children or not node.pages or access != node.last_access:
                heapq.heappop(self._heap)
                node.offered = False
                if node.pages:
                    self.offer(node)
                continue
            return node
        return None

    def pop(self) -> Node | None:
        """Take the oldest leaf out."""
        node = self.oldest()
        if node is not None:
            heapq.heappop(self._heap)
            node.offered = False
        return node
