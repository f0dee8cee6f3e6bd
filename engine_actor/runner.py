"""The model runner: executor and sampler in one call."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from engine_actor.executor import Executor, Runner
from engine_actor.sampling.logprobs import token_logprobs
from engine_actor.sampling.sampler import sample_on_device
from engine_actor.step import Logprobs, StepRecord, StepResult


@dataclass(frozen=True)
class Sampled:
    """Tokens int32 [S] and whether their logits were finite, bool [S], on the device; the rest as in a StepResult."""

    token_ids: torch.Tensor
    finite: torch.Tensor
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


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
        sampled = self._sample(record, self._executor.execute(record))
        token_ids, finite = sampled.token_ids.cpu().numpy(), sampled.finite.cpu().numpy()
        seconds = time.perf_counter() - started
        return StepResult(record.step, token_ids, finite, seconds, sampled.logprobs, sampled.prompt_logprobs)

    def _sample(self, record: StepRecord, logits: torch.Tensor) -> Sampled:
        """What a record's logits give. Waits for a GPU only where log probabilities are wanted."""
        prompt_logprobs = None
        if record.prompt_logprobs is not None:
            prompt_logprobs = _of_prompt(logits, record)
            logits = logits[_rows_of(record.sampled_tokens, record.logit_tokens)]
        wanted = record.sampling.logprobs
        # Copied, because sampling changes logits in place.
        raw = None if wanted is None else logits[torch.from_numpy(wanted.row.astype(np.int64))]
        token_ids, finite = sample_on_device(logits, record.sampling)
        logprobs = None
        if raw is not None and wanted is not None:
            logprobs = token_logprobs(raw, token_ids.cpu().numpy()[wanted.row], int(wanted.top.max()))
        return Sampled(token_ids, finite, logprobs, prompt_logprobs)


def _of_prompt(logits: torch.Tensor, record: StepRecord) -> Logprobs:
    wanted = record.prompt_logprobs
    assert wanted is not None
    rows = _rows_of(record.prompt_tokens, record.logit_tokens)
    return token_logprobs(logits[rows], wanted.target, int(wanted.top.max()))


def _rows_of(tokens: np.ndarray, logit_tokens: np.ndarray) -> torch.Tensor:
    """Rows of the logits that belong to tokens of the step."""
    return torch.from_numpy(np.searchsorted(logit_tokens, tokens))
