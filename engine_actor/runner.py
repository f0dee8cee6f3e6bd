"""The model runner: executor and sampler in one call."""

from __future__ import annotations

import time

import numpy as np
import torch

from engine_actor.executor import Executor, Runner
from engine_actor.sampling.logprobs import token_logprobs
from engine_actor.sampling.sampler import sample
from engine_actor.step import Logprobs, StepRecord, StepResult


class ModelRunner(Runner):
    """Runs records through an executor and samples a token for every row that ends its known tokens."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.info = executor.info
        self.num_pages = executor.num_pages
        self.graphs = executor.graphs

    @torch.inference_mode()
    def run(self, record: StepRecord) -> StepResult:
        started = time.perf_counter()
        if record.prompt_logprobs is None and record.sampling.plainly_greedy:
            highest = self._executor.execute_greedy(record)
            if highest is not None:
                seconds = time.perf_counter() - started
                return StepResult(record.step, np.maximum(highest, 0), highest >= 0, seconds)
        logits = self._executor.execute(record)
        prompt_logprobs = None
        if record.prompt_logprobs is not None:
            prompt_logprobs = _of_prompt(logits, record)
            logits = logits[_rows_of(record.sampled_tokens, record.logit_tokens)]
        wanted = record.sampling.logprobs
        # Copied, because sampling changes logits in place.
        raw = None if wanted is None else logits[torch.from_numpy(wanted.row.astype(np.int64))]
        token_ids, finite = sample(logits, record.sampling)
        logprobs = None
        if raw is not None and wanted is not None:
            logprobs = token_logprobs(raw, token_ids[wanted.row], int(wanted.top.max()))
        seconds = time.perf_counter() - started
        return StepResult(record.step, token_ids, finite, seconds, logprobs, prompt_logprobs)


def _of_prompt(logits: torch.Tensor, record: StepRecord) -> Logprobs:
    wanted = record.prompt_logprobs
    assert wanted is not None
    rows = _rows_of(record.prompt_tokens, record.logit_tokens)
    return token_logprobs(logits[rows], wanted.target, int(wanted.top.max()))


def _rows_of(tokens: np.ndarray, logit_tokens: np.ndarray) -> torch.Tensor:
    """Rows of the logits that belong to tokens of the step."""
    return torch.from_numpy(np.searchsorted(logit_tokens, tokens))
