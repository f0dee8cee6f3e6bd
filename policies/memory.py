"""KV memory: whom to preempt when pages run out, how much a batch will need at its peak, when starts are spread."""

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


SPREAD_WINDOW = 1 / 4
"""Part of a request's output over which ends are counted."""

SPREAD_EXCESS = 1.5
"""How many times the even number of ends may fall into it; chance alone seldom brings more."""


def ends_crowd(
    lengths: npt.ArrayLike,
    outputs: npt.ArrayLike,
    remaining: npt.ArrayLike,
    *,
    own_output: int,
    own_remaining: int,
    kv_tokens: int,
    limit: int,
) -> bool:
    """Whether a request that starts now would end together with too many of those that run.

    Requests that start together grow and end together: when they end most of the KV memory is empty, it fills with
    others that start together, and at their peak only so many fit as at full length. A batch whose ends are spread
    holds more, by a third where outputs are as long as prompts. With the memory full all the time it would have
    `kv_tokens` by the mean over their lives of what its requests hold; below half of that everybody may start, and
    where that is `limit` or more, the slots of the engine, memory is not what lacks.

    `lengths`, `outputs` and `remaining` are int [n], tokens by prediction of each running request: prompt and output,
    output, and output still to come (0 where the prediction was wrong: when such a request ends is not known).
    """
    length = np.asarray(lengths, dtype=np.float64)
    output = np.maximum(np.asarray(outputs, dtype=np.float64), 1.0)
    if not length.size:
        return False
    batch = kv_tokens / max(1.0, float(np.mean(length - output / 2)))
    if batch >= limit or length.size < batch / 2:
        return False
    window = SPREAD_WINDOW * max(1, own_output)
    left = np.asarray(remaining)
    together = np.count_nonzero((left > 0) & (np.abs(left - own_remaining) <= window))
    even = window * batch * float(np.mean(1.0 / output))
    return bool(together + 1 > max(1.0, SPREAD_EXCESS * even))
