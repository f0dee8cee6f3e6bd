"""The model runner: executor and sampler in one call."""

from __future__ import annotations

import time

from engine_actor.executor import Executor, Runner
from engine_actor.sampling.sampler import sample
from engine_actor.step import StepRecord, StepResult


class ModelRunner(Runner):
    """Runs records through an executor and samples a token for every row that ends its known tokens."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.info = executor.info
        self.num_pages = executor.num_pages
        self.graphs = executor.graphs

    def run(self, record: StepRecord) -> StepResult:
        started = time.perf_counter()
        token_ids, finite = sample(self._executor.execute(record), record.sampling)
        return StepResult(record.step, token_ids, finite, time.perf_counter() - started)
