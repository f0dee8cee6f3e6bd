"""Drawing a token on the CPU, one row at a time: a row costs a few passes over its logits and never a sort of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_actor.step import Float32

_BLOCK = 256
_GROUPS = 1024
_NUCLEUS_CANDIDATES = 200
"""The end of the nucleus is looked for among so many of the likeliest tokens first."""


def draw(
    logits: Float32, highest: float, temperature: float, top_k: int, top_p: float, min_p: float, random: float
) -> int:
    """A token for finite logits [vocab] whose maximum is `highest`, by one random number in [0, 1).

    Temperature > 0, then min_p, then top_k, then top_p on what is left; ties with the last one kept are kept.
    """
    kept = None
    if 0 < top_k < len(logits) or min_p > 0:
        bound = -np.inf if min_p <= 0 else highest + temperature * float(np.log(min_p))
        if 0 < top_k < len(logits):
            bound = max(bound, float(_largest(logits, top_k)))
        kept = np.flatnonzero(logits >= np.float32(min(bound, highest)))
        logits = logits[kept]
    weights = _weights(logits, highest, temperature)
    if top_p < 1:
        in_nucleus = np.flatnonzero(weights >= _least_in_nucleus(weights, top_p))
        weights = weights[in_nucleus]
        kept = in_nucleus if kept is None else kept[in_nucleus]
    index = _invert(weights, random)
    return index if kept is None else int(kept[index])


def lower_bound(values: Float32, count: int) -> np.float32:
    """A value that at least `count` of the values reach, and few more: cheap, where many values are not near it.

    It is the count-th largest of the maxima of groups. Of few values it is the least.
    """
    if 4 * count < _GROUPS < len(values) // 4:
        even = len(values) // _GROUPS * _GROUPS
        maxima = values[:even].reshape(-1, _GROUPS).max(axis=0)
        bound: np.float32 = np.partition(maxima, -count)[-count]
        return bound
    least: np.float32 = values.min()
    return least


def _weights(logits: Float32, highest: float, temperature: float) -> Float32:
    """exp of (logits - highest) / temperature: shifted first, so that no temperature can overflow."""
    weights: Float32 = np.subtract(logits, np.float32(highest))
    with np.errstate(over="ignore"):
        np.divide(weights, np.float32(temperature), out=weights)
    np.exp(weights, out=weights)
    return weights


def _largest(values: Float32, count: int) -> np.float32:
    """The count-th largest value."""
    candidates = values[values >= lower_bound(values, count)]
    largest: np.float32 = np.partition(candidates, -count)[-count]
    return largest


def _least_in_nucleus(weights: Float32, top_p: float) -> np.float32:
    """The least weight in the smallest set of greatest ones that reaches top_p of the sum (Holtzman et al., "The
    curious case of neural text degeneration", 2020)."""
    needed = top_p * float(_block_sums(weights).sum())
    pool = weights[weights >= lower_bound(weights, _NUCLEUS_CANDIDATES)]
    if pool.sum(dtype=np.float64) < needed:
        # The upper bits of a positive float rise with it: its sign, exponent and the first seven bits of its fraction.
        bucket = weights.view(np.int32) >> 16
        sums = np.bincount(bucket, weights)
        above = np.cumsum(sums[::-1])[::-1]  # of the bucket and all above
        last = int(np.flatnonzero(above >= needed)[-1]) if above[0] >= needed else int(bucket.min())
        needed -= float(above[last] - sums[last])
        pool = weights[bucket == last]
    candidates = np.sort(pool)[::-1]
    cumulative = np.cumsum(candidates, dtype=np.float64)
    least: np.float32 = candidates[min(int(np.searchsorted(cumulative, needed)), len(candidates) - 1)]
    return least


def _invert(weights: Float32, random: float) -> int:
    """The index at which the cumulative weight passes `random` times the sum; never one of weight zero."""
    if len(weights) <= 2 * _BLOCK:
        return _passes(np.cumsum(weights, dtype=np.float64), random)
    sums = np.cumsum(_block_sums(weights))
    block = _passes(sums, random)
    before = float(sums[block - 1]) if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + _passes(inside, (random * float(sums[-1]) - before) / float(inside[-1]))


def _passes(cumulative: npt.NDArray[np.float64], random: float) -> int:
    # side="right" steps over zeros; rounding must not step over the last weight that is none.
    index = int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))


def _block_sums(weights: Float32) -> npt.NDArray[np.float64]:
    even = len(weights) // _BLOCK * _BLOCK
    sums = weights[:even].reshape(-1, _BLOCK).sum(axis=1)
    return np.append(sums, weights[even:].sum()).astype(np.float64)
