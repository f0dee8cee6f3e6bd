"""Cost models: how many seconds a step takes on some hardware, and the limits an engine there would have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine_actor.step import StepRecord

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class StepShape:
    """What the time of a step depends on.

    Rows of one token count as decode. `decode_context` is the number of cached tokens that they attend to,
    `prefill_pairs` the number of (query, key) pairs in the attention of the other rows.
    """

    prefill_tokens: int
    decode_rows: int
    decode_context: int
    prefill_pairs: int

    @classmethod
    def of(cls, record: StepRecord) -> StepShape:
        start, length = record.start.astype(np.int64), record.length.astype(np.int64)
        prefill = length > 1
        return cls(
            prefill_tokens=int(length[prefill].sum()),
            decode_rows=int(len(length) - prefill.sum()),
            decode_context=int(start[~prefill].sum()),
            prefill_pairs=int(
                (length[prefill] * start[prefill] + length[prefill] * length[prefill] // 2).sum()
            ),
        )


class StepCost(Protocol):
    """Seconds of one step."""

    def seconds(self, shape: StepShape) -> float: ...


@dataclass(frozen=True)
class LinearCost:
    """A linear model of the step time, as `benchmarks.simulate.fit` makes it. Coefficients are seconds per unit."""

    base: float
    prefill_token: float
    decode_row: float
    decode_context: float
    prefill_pair: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self.base
            + self.prefill_token * shape.prefill_tokens
            + self.decode_row * shape.decode_rows
            + self.decode_context * shape.decode_context
            + self.prefill_pair * shape.prefill_pairs
        )


@dataclass(frozen=True)
class CostModel:
    """A step cost with the engine limits that go with the hardware. `kv_tokens` is the KV pool in tokens."""

    name: str
    step: StepCost
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int


def a10g_7b() -> CostModel:
    """Llama-2-7B in float16 on an A10G (24 GB), as in Sheng et al., "Fairness in Serving LLMs" (OSDI'24).

    The pool of 10,000 tokens is the paper's setting (`max_total_token_num` of its artifact, Ying1123/VTC-artifact).
    The coefficients are a least-squares fit to the step times in that artifact's `fair_bench/cost_profile.json`
    (16 measured pairs of input and output length, batches of 13 to 138): decode steps within 10 %, half of them
    within 3 %; prefill 4,650 tokens/s from 64 to 512 tokens, without a quadratic part that could be seen.

    The profile runs the model alone. What a server adds to each step is the one number set by its result:
    1 ms, with which FCFS on the 27-client trace comes to the throughput that was measured there (777 tokens/s).
    """
    return CostModel(
        name="a10g-7b",
        step=LinearCost(
            base=0.0172 + 0.001,
            prefill_token=1 / 4650,
            decode_row=2.25e-4,
            decode_context=2.03e-6,
            prefill_pair=0.0,
        ),
        kv_tokens=10_000,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        prefill_chunk_size=2048,
        max_model_len=4096,
    )


def a100_7b() -> CostModel:
    """Llama-2-7B in float16 on an A100 (80 GB, SXM), from LMDeploy's published measurements.

    The coefficients are a least-squares fit to 18 rows of the static benchmark in InternLM/lmdeploy,
    `docs/en/benchmark/a100_fp16.md` (batches of 1 to 64, 1 to 2,048 tokens in, 128 or 2,048 out): within 11 %, half
    of them within 2 %. The pool is the 78.4 GB that the same table shows in use less 13.5 GB of weights, at 512 KiB
    a token. The limits on sequences and tokens of a step are ours; requests may be longer than the model's own 4,096
    tokens, so that traces with long prompts can be run.
    """
    return CostModel(
        name="a100-7b",
        step=LinearCost(
            base=9.66e-3,
            prefill_token=8.0e-5,
            decode_row=5.45e-5,
            decode_context=2.92e-7,
            prefill_pair=0.0,
        ),
        kv_tokens=120_000,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        prefill_chunk_size=2048,
        max_model_len=16_384,
    )


def h200_8b() -> CostModel:
    """Llama-3.1-8B in FP8 with FP8 KV on an H200 (141 GB), from TensorRT-LLM's published throughput.

    Row, context, prefill and pair coefficients are a least-squares fit to the 10 rows for this model in
    NVIDIA/TensorRT-LLM, `docs/source/performance/perf-overview.md` of version 1.0 (128 to 20,000 tokens in, 128 to
    4,096 out): within 2 %. Saturated runs do not show the base of a step; 6.3 ms is what vLLM's nightly benchmark
    (build 9515) leaves of its 6.5 ms a step at batch 8, with the same model in bfloat16, so it errs on the slow
    side; the fitted context coefficient is lowered by the part of the base that it contained. The pool is 95 % of the
    memory less weights and work space, at 64 KiB a token. The limits on sequences and tokens of a step are ours.
    """
    return CostModel(
        name="h200-8b",
        step=LinearCost(
            base=6.3e-3,
            prefill_token=1.37e-5,
            decode_row=1.90e-5,
            decode_context=1.27e-8,
            prefill_pair=5.6e-10,
        ),
        kv_tokens=1_700_000,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        prefill_chunk_size=8192,
        max_model_len=131_072,
    )


def cpu() -> CostModel:
    """SmolLM2-135M in bfloat16 on our own native executor and two cores, from `data/cpu.json`.

    That file is written by `python -m benchmarks.simulate.fit`, which runs a workload and fits the times of its
    steps. The limits are the product's defaults on a CPU, the pool its default of 1 GiB.
    """
    with (DATA / "cpu.json").open(encoding="utf-8") as file:
        fitted = json.load(file)
    return CostModel(
        name="cpu",
        step=LinearCost(**fitted["seconds_per"]),
        kv_tokens=fitted["kv_tokens"],
        max_num_seqs=32,
        max_num_batched_tokens=128,
        prefill_chunk_size=128,
        max_model_len=8192,
    )


COST_MODELS: dict[str, Callable[[], CostModel]] = {
    "cpu": cpu,
    "a10g-7b": a10g_7b,
    "a100-7b": a100_7b,
    "h200-8b": h200_8b,
}
