"""The executor contract: a step record goes in, logits come out.

Scheduler, pages and sampler do not know which executor runs. The torch executor drives decoder modules over an
attention backend; a native one may replace the whole step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_actor.step import Int32, StepRecord, StepResult

if TYPE_CHECKING:
    import torch

PAGE_SIZE = 16
"""Tokens per KV page."""

DUMMY_PAGE = 0
"""Page that padding writes to. Never handed out."""


@dataclass(frozen=True)
class ExecutorInfo:
    """What runs, for logs, reports and benchmarks."""

    executor: str
    attention_backend: str
    device: str
    dtype: str
    quantization: str
    threads: int
    fallback_reason: str | None = None


@dataclass
class GraphCounters:
    """What captured graphs did, cumulative. `eager_steps` are those that no graph could serve: steps with prefill,
    or with too many rows."""

    captured: int = 0
    capture_seconds: float = 0.0
    replays: int = 0
    eager_steps: int = 0


class Executor(ABC):
    """Computes one step over the paged KV cache it owns. `graphs` counts where steps are captured graphs."""

    info: ExecutorInfo
    graphs: GraphCounters | None = None
    num_pages: int
    """Size of the KV pool in pages, the dummy page included."""

    @abstractmethod
    def execute(self, record: StepRecord) -> torch.Tensor:
        """Write the KV of every token of the record and return logits.

        Returns float32 [L, vocab] for the record's `logit_tokens`, in their order (L may be 0). They belong to the
        caller until the next call.
        """

    def execute_greedy(self, record: StepRecord) -> Int32 | None:
        """Like `execute`, but returns the likeliest token of every one of `logit_tokens`, -1 where logits were not
        finite. None, and nothing is done, where the executor has no faster way to it than over the logits."""
        return None

    @property
    def part_seconds(self) -> dict[str, float]:
        """Seconds spent in parts of the steps, by name, since the start; empty where they are not counted."""
        return {}


class Runner(ABC):
    """A record in, sampled tokens out: what the engine loop drives."""

    info: ExecutorInfo
    num_pages: int
    graphs: GraphCounters | None = None

    @abstractmethod
    def run(self, record: StepRecord) -> StepResult:
        """Execute and sample one step. Called from one thread only."""

    def start(self, record: StepRecord) -> Callable[[], StepResult]:
        """Begin a step; what is returned waits for its result. From the same thread, steps in order.

        Only a runner made for asynchronous scheduling takes records with tokens that are not known yet, and returns
        before the step has ended; this one runs it at once.
        """
        result = self.run(record)
        return lambda: result
