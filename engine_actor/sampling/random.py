"""Counter-based randomness: a number is a function of (seed, position) and of nothing else.

So a token is the same after a preemption, on another engine and in any batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_actor.step import Int32, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniform(seed: UInt64, position: Int32) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, from seed and position (both [S]), with 53 random bits.

    The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA'14), applied to the seed and again to the position added to it.
    """
    mixed = _mix(_mix(seed) + position.astype(np.uint64) * _GOLDEN)
    numbers: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: UInt64) -> UInt64:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    mixed: UInt64 = x ^ (x >> np.uint64(31))
    return mixed
