"""The free list of KV pages: the one place that hands pages out and takes them back."""

from __future__ import annotations

from collections.abc import Iterable

from engine_actor.executor import DUMMY_PAGE


class PageError(RuntimeError):
    """A page was freed twice, or more pages were asked for than there are: a bug in the caller."""


class PagePool:
    """Page ids 1 .. num_pages - 1; page 0 is the dummy page and never leaves.

    Invariant: every page is either free or held by exactly one holder (a request or the prefix cache).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a KV pool needs at least 2 pages, got {num_pages}")
        self.total = num_pages - 1
        self._free = [page for page in range(num_pages - 1, -1, -1) if page != DUMMY_PAGE]
        self._is_free = bytearray(b"\x01") * num_pages
        self._is_free[DUMMY_PAGE] = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. Raises PageError when fewer are free: callers make room first."""
        if count > len(self._free):
            raise PageError(f"{count} pages asked for, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises PageError on a double free or on the dummy page."""
        for page in pages:
            if page == DUMMY_PAGE or self._is_free[page]:
                raise PageError(f"page {page} freed twice or never handed out")
            self._is_free[page] = 1
            self._free.append(page)
