"""A pytest plugin: the native kernels compiled with sanitizers, and every array they get in an allocation of its own.

The process needs the runtime of AddressSanitizer preloaded; see test_native_sanitizers.py.
"""

from __future__ import annotations

import pytest
import torch

from engine_actor.native import build, executor, memory, weights

COMPILER_FLAGS = (
    *("-std=c++20", "-O1", "-g", "-fopenmp", "-fPIC", "-shared", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _keep(self: memory.Arena, tensor: torch.Tensor) -> int:
    self._chunks.append(tensor.contiguous().clone())
    return self._chunks[-1].data_ptr()


def use() -> None:
    build._COMPILER_FLAGS = COMPILER_FLAGS  # type: ignore[assignment]
    build._COMPILE_SECONDS = 900
    for module in (executor, memory, weights):
        vars(module)["zeros"] = _zeros
    memory.Arena.keep = _keep  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="session")
def _sanitized() -> None:
    use()
