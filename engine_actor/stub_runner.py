"""A runner without a model: tokens at a set pace, for trying the whole path and for tests of everything around it."""

from __future__ import annotations

import time

import numpy as np

from engine_actor.executor import ExecutorInfo, Runner
from engine_actor.step import Int32, Logprobs, StepRecord, StepResult

STUB_TEXT = b"The stub engine has no model. "


class StubRunner(Runner):
    """Answers every request with STUB_TEXT, byte by byte, again and again; token ids are bytes.

    The byte depends on the position alone, so an answer is the same in any batch and after a preemption.
    A step takes `step_seconds` plus `token_seconds` per token.
    """

    def __init__(self, num_pages: int, *, step_seconds: float = 0.005, token_seconds: float = 0.0001) -> None:
        self.num_pages = num_pages
        self.info = ExecutorInfo(
            executor="stub",
            attention_backend="none",
            device="cpu",
            dtype="none",
            quantization="none",
            threads=1,
        )
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds

    def run(self, record: StepRecord) -> StepResult:
        seconds = self._step_seconds + self._token_seconds * record.num_tokens
        time.sleep(seconds)
        text = np.frombuffer(STUB_TEXT, np.uint8)
        tokens = text[record.sampling.position % len(text)].astype(np.int32)
        wanted, prompt = record.sampling.logprobs, record.prompt_logprobs
        return StepResult(
            record.step,
            tokens,
            np.ones(len(tokens), np.bool_),
            seconds,
            None if wanted is None else _certain(tokens[wanted.row]),
            None if prompt is None else _certain(prompt.target),
        )


def _certain(tokens: Int32) -> Logprobs:
    """Log probabilities of tokens that could not have been others."""
    zeros = np.zeros(len(tokens), np.float32)
    return Logprobs(tokens, zeros, tokens[:, None], zeros[:, None])
