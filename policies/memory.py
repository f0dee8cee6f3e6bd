"""KV memory: whom to preempt when pages run out, and how much a batch will need at its peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class VictimCandidate:
    """A request that could be preempted.

    `pages` are the KV pages it holds, `uncached_tokens` those it would compute again on return.
    `share` is what its tenant is entitled to, in any unit. `arrival_order` grows with arrival and must survive
    preemption: the guarantee of progress rests on it.
    """

    id: int
    tenant: str
    share: float
    pages: int
    uncached_tokens: int
    arrival_order: int


def choose_victim(candidates: Sequence[VictimCandidate]) -> VictimCandidate:
    """The request to preempt for pages. Raises ValueError if there is no candidate.

    It is taken from the tenant furthest over its KV share (most pages per share), and there it is the
    request with the fewest tokens to compute again, the newest of equals.

    The oldest request of all is never taken while there is another one. So at any moment one request only
    moves forward until it ends, and preemption cannot go in circles.
    """
    if not candidates:
        raise ValueError("no candidate for preemption")
    if len(candidates) == 1:
        return candidates[0]
    pages_per_share: defaultdict[str, float] = defaultdict(float)
    for candidate in candidates:
        pages_per_share[candidate.tenant] += candidate.pages / candidate.share
    oldest = min(candidates, key=lambda c: c.arrival_order)
    return min(
        (c for c in candidates if c is not oldest),
        key=lambda c: (-pages_per_share[c.tenant], c.uncached_tokens, -c.arrival_order),
    )


def estimate_peak_tokens(held: npt.ArrayLike, remaining: npt.ArrayLike) -> int:
    """Most KV tokens a batch will hold at once, if each request ends after its `remaining` output tokens.

    `held` and `remaining` are int [n]: tokens in the cache now, and tokens still to come, per request. All
    requests grow by one token a step; one that ends gives back what it holds. The peak falls on the end of
    some request, so with requests ordered by remaining, longest first, it is max over i of remaining_i * i +
    sum of held_1..held_i (Gong et al., Past-Future scheduler, arXiv 2507.10150).

    Raises ValueError for arrays of unequal or wrong shape and for negative numbers.
    """
    held_tokens = np.asarray(held, dtype=np.int64)
    remaining_tokens = np.asarray(remaining, dtype=np.int64)
    if held_tokens.ndim != 1 or held_tokens.shape != remaining_tokens.shape:
        raise ValueError("held and remaining must be one-dimensional and of equal length")
    if held_tokens.size == 0:
        return 0
    if held_tokens.min() < 0 or remaining_tokens.min() < 0:
        raise ValueError("token counts must not be negative")
    order = np.argsort(-remaining_tokens, kind="stable")
    alive = np.arange(1, held_tokens.size + 1)
    return int(np.max(remaining_tokens[order] * alive + np.cumsum(held_tokens[order])))
