"""The machine's ceilings, measured with the instructions that the kernels use."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine_actor.native.build import load_library
from engine_actor.native.memory import zeros

_BYTES = 128 << 20
_ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """Operations (a multiplication or an addition) and bytes per second, of all threads together."""

    bf16_operations: float
    int8_operations: float
    memory_bytes: float


def measure_ceilings(threads: int) -> Ceilings:
    """The best of a few rounds, in CPU time: about 0.2 s. Raises NativeUnavailable."""
    library = load_library()
    memory = zeros((_BYTES,), torch.uint8).fill_(1)
    best = [0.0, 0.0, 0.0]
    for _ in range(_ROUNDS):
        rates = (ctypes.c_double * 3)()
        addresses = [ctypes.addressof(rates) + 8 * i for i in range(3)]
        library.evenhand_ceilings(memory.data_ptr(), _BYTES, *addresses, threads)
        best = [max(pair) for pair in zip(best, rates, strict=True)]
    return Ceilings(*best)
