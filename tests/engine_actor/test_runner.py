"""Executor and sampler together."""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.executor import Executor, ExecutorInfo
from engine_actor.runner import ModelRunner
from engine_actor.step import StepRecord


class FixedExecutor(Executor):
    """Answers every record with given logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.info = ExecutorInfo("fixed", "none", "cpu", "float32", "none", 1)
        self.num_pages = 8
        self.logits = logits
        self.record: StepRecord | None = None

    def execute(self, record: StepRecord) -> torch.Tensor:
        self.record = record
        return self.logits


def test_a_result_answers_its_record(make_record, make_row) -> None:
    executor = FixedExecutor(torch.tensor([[0.0, 3.0, 1.0], [float("nan"), 0.0, 0.0]]))
    runner = ModelRunner(executor)
    assert (runner.info, runner.num_pages) == (executor.info, 8)
    record = make_record(make_row([1], [1]), make_row([1, 2], [2], more=True), make_row([1], [3]))
    result = runner.run(record)
    assert executor.record is record
    assert (result.step, result.token_ids.tolist(), result.finite.tolist()) == (7, [1, 0], [True, False])
    assert result.token_ids.dtype == np.int32 and result.finite.dtype == np.bool_
    assert result.model_seconds > 0


def test_a_step_that_samples_nothing(make_record, make_row) -> None:
    result = ModelRunner(FixedExecutor(torch.empty(0, 3))).run(make_record(make_row([1], [1], more=True)))
    assert len(result.token_ids) == len(result.finite) == 0


def test_sampled_text_depends_on_the_seed_alone(float32_executor, texts, make_record, make_row) -> None:
    """The same request alone, and beside others in another order, on other pages, samples the same tokens."""
    runner = ModelRunner(float32_executor)

    def generate(prompts: list[list[int]], seeds: list[int], first_page: int) -> list[list[int]]:
        sequences = [list(tokens) for tokens in prompts]
        tables = [list(range(first_page + 40 * i, first_page + 40 * (i + 1))) for i in range(len(prompts))]
        starts = [0] * len(prompts)
        for _ in range(12):
            rows = [
                make_row(tokens[start:], table, start=start)
                for tokens, table, start in zip(sequences, tables, starts, strict=True)
            ]
            starts = [len(tokens) for tokens in sequences]
            result = runner.run(make_record(*rows, temperature=0.8, seeds=seeds))
            for tokens, token in zip(sequences, result.token_ids.tolist(), strict=True):
                tokens.append(token)
        return [tokens[len(start) :] for tokens, start in zip(sequences, prompts, strict=True)]

    together = generate([texts[3], texts[2], texts[3]], [5, 6, 7], 1)
    assert generate([texts[3]], [5], 200)[0] == together[0]
    assert generate([texts[2], texts[3]], [6, 5], 100)[::-1] == [together[0], together[1]]
    assert together[0] != together[2]
