"""Names of prefix-cache pages that gateway, fair queue and engine agree on without sending tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

MAX_PAGES = 256
"""Pages of a prompt that a ticket names; longer prefixes count as this long."""


def page_hashes(namespace: str, token_ids: Sequence[int], page_size: int) -> tuple[int, ...]:
    """Hashes of the whole pages of a prompt that can be found cached: its last token is always computed."""
    pages = min(MAX_PAGES, max(0, len(token_ids) - 1) // page_size)
    run = array("i", token_ids[: pages * page_size]).tobytes()
    return tuple(chain_hashes(root_hash(namespace), run, page_size))


def root_hash(namespace: str) -> int:
    """What the first page of a namespace is chained to. A namespace is a secret, so its hashes cannot be guessed."""
    return _hash(namespace.encode())


def chain_hashes(parent: int, run: bytes, page_size: int) -> Iterator[int]:
    """Hash of each page of a run of whole pages, int32 token ids as bytes. A hash covers all pages before it.

    64 bits, for estimates only: the cache itself compares tokens.
    """
    size = page_size * array("i").itemsize
    for begin in range(0, len(run), size):
        parent = _hash(parent.to_bytes(8, "little") + run[begin : begin + size])
        yield parent


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
