"""A runner that computes nothing: it knows how long a step takes and where every answer ends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.simulate.cost_models import StepCost, StepShape
from engine_actor.executor import ExecutorInfo, Runner
from engine_actor.step import StepRecord, StepResult

END_TOKEN = 0
"""Sampled where a request ends by itself; its sampling parameters must name it as a stop token."""

_OTHER_TOKEN = 1
_NEVER = 1 << 40


class CostModelRunner(Runner):
    """Samples END_TOKEN at the position where a request ends and another token everywhere else.

    A request is known by its sampling seed. `last_positions` maps seeds to the position of the last token; others
    never end. `model_seconds` of a result is virtual time: the caller's clock must move by it.
    """

    def __init__(self, cost: StepCost, num_pages: int, last_positions: Mapping[int, int]) -> None:
        self.num_pages = num_pages
        self.info = ExecutorInfo(
            executor="cost model",
            attention_backend="none",
            device="none",
            dtype="none",
            quantization="none",
            threads=0,
        )
        self._cost = cost
        self._last_positions = last_positions
        self.elapsed = 0.0
        """Virtual seconds of all steps so far."""

    def run(self, record: StepRecord) -> StepResult:
        columns = record.sampling
        last = [self._last_positions.get(seed, _NEVER) for seed in columns.seed.tolist()]
        tokens = np.where(columns.position >= np.array(last, np.int64), END_TOKEN, _OTHER_TOKEN)
        seconds = self._cost.seconds(StepShape.of(record))
        self.elapsed += seconds
        return StepResult(record.step, tokens.astype(np.int32), np.ones(len(last), np.bool_), seconds)
