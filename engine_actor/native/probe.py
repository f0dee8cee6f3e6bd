"""A look at the native executor before it is trusted: a small random model against torch in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine_actor.executor import PAGE_SIZE, Executor
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.config import ModelConfig
from engine_actor.loading.layout import decoder_shapes
from engine_actor.loading.source import ResolvedSource
from engine_actor.native.build import NativeUnavailable
from engine_actor.native.executor import NativeExecutor
from engine_actor.step import SamplingColumns, StepRecord
from engine_actor.torch_executor import TorchExecutor

# bfloat16 alone makes about 0.005, int8 0.02, int4 0.1.
_TOLERANCES = {"none": 0.03, "int8": 0.08, "int4": 0.4}
_VOCAB = 100
_LENGTHS = (70, 5, 17)


class RandomWeights:
    """Weights of a decoder, drawn by a seed."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {
            name: torch.randn(shape, generator=generator) * 0.1 + (1.0 if len(shape) == 1 else 0.0)
            for name, shape in decoder_shapes(config).items()
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].bfloat16()


def probe(config: ModelConfig, threads: int, quantization: str = "none") -> None:
    """Compare a ragged prefill and the decode step after it, at the head size and group of `config`.

    Raises NativeUnavailable when the logits are not those of torch.
    """
    heads = config.num_heads // config.num_kv_heads
    small = replace(
        config,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4 * heads,
        num_kv_heads=4,
        vocab_size=_VOCAB,
    )
    checkpoint = Checkpoint(small, ResolvedSource("hf", Path()), RandomWeights(small, 0))
    pages = 1 + sum(length // PAGE_SIZE + 1 for length in _LENGTHS)
    native = NativeExecutor(checkpoint, num_pages=pages, threads=threads, quantization=quantization)
    exact = TorchExecutor(checkpoint, dtype="float32", num_pages=pages, threads=threads)
    for record in (
        _record(np.zeros(3, np.int32), np.array(_LENGTHS)),
        _record(np.array(_LENGTHS), np.ones(3)),
    ):
        error = _difference(native, exact, record)
        if not error < _TOLERANCES[quantization]:
            raise NativeUnavailable(f"its logits are not torch's (relative difference {error:.3g})")


def _difference(executor: Executor, exact: Executor, record: StepRecord) -> float:
    expected = exact.execute(record)
    return float((executor.execute(record) - expected).norm() / expected.norm())


def _record(start: np.ndarray, length: np.ndarray) -> StepRecord:
    """Rows whose pages lie one after another from page 1 on."""
    rows = len(start)
    start, length = start.astype(np.int32), length.astype(np.int32)
    first_page = np.cumsum([1, *(n // PAGE_SIZE + 1 for n in _LENGTHS)])
    tables = [
        np.arange(first_page[i], first_page[i] + -(-(start[i] + length[i]) // PAGE_SIZE)) for i in range(rows)
    ]
    return StepRecord(
        epoch=0,
        step=0,
        request=np.arange(rows, dtype=np.int32),
        request_epoch=np.zeros(rows, np.int32),
        start=start,
        length=length,
        is_last_chunk=np.ones(rows, np.bool_),
        token_ids=np.random.default_rng(1).integers(0, _VOCAB, int(length.sum())).astype(np.int32),
        token_indptr=np.cumsum([0, *length]).astype(np.int32),
        page_indices=np.concatenate(tables).astype(np.int32),
        page_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        sampling=SamplingColumns(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            seed=np.zeros(rows, np.uint64),
            position=start + length,
        ),
    )
