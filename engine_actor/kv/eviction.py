"""Which namespace of the prefix cache gives pages up."""

from __future__ import annotations

from collections.abc import Collection

from engine_actor.kv.node import Root

PROTECTED_TURNOVERS = 4
"""A namespace keeps its share of the pool until so many pools of pages have entered the tree since its last use."""


def pages_to_evict_from(roots: Collection[Root], pool_pages: int, inserted_pages: int) -> tuple[Root, int]:
    """The namespace to evict from and how many pages at most, before asking again.

    Each namespace used lately has a share of the pool by weight. Least recently used over all of them holds only
    between those that stay within their shares: a tenant that fills the cache with new prefixes gives up its own
    first, and what a quiet one needs again is still there. At least one root must have evictable pages.
    """
    candidates = [root for root in roots if root.evictable]
    if len(candidates) == 1:
        return candidates[0], candidates[0].evictable
    lately = inserted_pages - PROTECTED_TURNOVERS * pool_pages
    stale = [root for root in candidates if root.used_at < lately]
    if stale:
        root = min(stale, key=lambda root: root.used_at)
        return root, root.evictable
    unit = pool_pages / sum(root.weight for root in roots if root.used_at >= lately)
    furthest = max(candidates, key=lambda root: (root.evictable + root.locked) / root.weight)
    excess = furthest.evictable + furthest.locked - furthest.weight * unit
    if excess > 0:
        return furthest, min(furthest.evictable, int(excess) + 1)
    leaves = [leaf for root in candidates if (leaf := root.leaves.oldest()) is not None]
    leaf = min(leaves, key=lambda leaf: leaf.last_access)
    return leaf.root, len(leaf.pages)
