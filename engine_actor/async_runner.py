"""The runner for asynchronous scheduling: a step is begun while the one before runs on the device.

The tokens that a step samples stay on the device, where the next one reads them; a copy follows to the host. vLLM's
asynchronous scheduling and SGLang's overlap scheduler work in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine_actor.runner import ModelRunner
from engine_actor.step import StepRecord, StepResult
from engine_actor.torch_executor import TorchExecutor
from engine_actor.transfer import download


class AsyncModelRunner(ModelRunner):
    """Begins steps without waiting for the device, but for those whose log probabilities are wanted.

    On a CPU a step is computed when it is begun.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        super().__init__(executor)
        self._torch_executor = executor
        self._sampled: torch.Tensor | None = None

    @torch.inference_mode()
    def start(self, record: StepRecord) -> Callable[[], StepResult]:
        """Begin a step; the tokens it does not know are those of the step begun before."""
        started = time.perf_counter()
        sampled = self._sample(record, self._torch_executor.execute(record, self._sampled))
        self._sampled = sampled.token_ids
        wait = download(torch.stack((sampled.token_ids, sampled.finite.int())))
        seconds = time.perf_counter() - started

        def result() -> StepResult:
            waiting = time.perf_counter()
            token_ids, finite = wait()
            waited = time.perf_counter() - waiting
            return StepResult(
                record.step,
                token_ids,
                finite.astype(bool),
                seconds + waited,
                sampled.logprobs,
                sampled.prompt_logprobs,
            )

        return result
