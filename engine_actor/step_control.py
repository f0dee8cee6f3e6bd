"""How large the next step may be: the engine's own measure of its speed, against what its requests ask for."""

from __future__ import annotations

import numpy as np

from engine_actor.executor import PAGE_SIZE
from engine_actor.request import StreamRow
from engine_actor.scheduler import Scheduler
from engine_actor.step import StepRecord
from policies.latency_model import StepEstimate, StepFeatures, StepTimeModel
from policies.step_budget import decode_batch_limit, decode_slack, memory_batch_limit, step_token_budget

_LENGTH_MEMORY = 1.0 - 1.0 / 64
_LENGTHS_TO_TRUST = 32


def step_features(record: StepRecord) -> StepFeatures:
    """What a record computes, as the latency model counts it."""
    decodes = record.length == 1
    chunks = ~decodes
    lengths = record.length[chunks].astype(np.float64)
    return StepFeatures(
        prefill_tokens=int(lengths.sum()),
        decode_rows=int(np.count_nonzero(decodes)),
        decode_context=int(record.start[decodes].sum()) + int(np.count_nonzero(decodes)),
        prefill_context=float((lengths * (record.start[chunks] + lengths / 2)).sum()),
    )


class StepControl:
    """Learns step times and chooses token budgets and batch sizes. Clock-free: a simulator drives it as well.

    Around each step, in the thread that drives the scheduler:

        budget = control.token_budget(now)
        record = scheduler.schedule(now, budget)  ...run...  rows = scheduler.commit(record, result, now)
        control.observe(record, rows, seconds)

    Without targets at its requests, the configured bounds stand.
    """

    def __init__(self, scheduler: Scheduler, model: StepTimeModel | None = None) -> None:
        """`model` may come calibrated."""
        self._scheduler = scheduler
        self._model = model or StepTimeModel()
        self._lengths = 0
        # Sums over ended requests, each weighted by its steps: steps, tokens held, their squares.
        self._steps = self._held = self._held_squares = 0.0
        self._decode_step_seconds: float | None = None

    @property
    def estimate(self) -> StepEstimate | None:
        """What a step takes; None before the first one."""
        return self._model.estimate()

    def observe(self, record: StepRecord, rows: list[StreamRow], seconds: float) -> None:
        """Learn from a step that took `seconds`, and from the requests that ended in it."""
        features = step_features(record)
        self._model.observe(features, seconds)
        self._decode_step_seconds = seconds if features.decode_rows else None
        for row in rows:
            if row.finish_reason in ("stop", "length") and row.usage is not None:
                usage = row.usage
                self._observe_life(usage.computed_input + usage.cached_input, usage.output)

    def take_decode_step(self) -> float | None:
        """Seconds of the last step, if it had decodes in it: once per step."""
        seconds, self._decode_step_seconds = self._decode_step_seconds, None
        return seconds

    def token_budget(self, now: float) -> int | None:
        """Tokens of the next step, or None where the configured bound stands."""
        slack: float | None = None
        rows = context = position = chunks = 0
        for sequence in self._scheduler.running:
            if sequence.pending > 1:
                position += sequence.computed
                chunks += 1
                continue
            rows += 1
            context += sequence.computed
            request = sequence.request
            if (request.tpot_ms is None and request.itl_ms is None) or sequence.first_token_at is None:
                continue
            mine = decode_slack(
                now,
                first_token_at=sequence.first_token_at,
                last_token_at=sequence.last_token_at or sequence.first_token_at,
                output_tokens=sequence.output_tokens,
                tpot=None if request.tpot_ms is None else request.tpot_ms / 1e3,
                itl=None if request.itl_ms is None else request.itl_ms / 1e3,
            )
            if mine is not None:
                slack = mine if slack is None else min(slack, mine)
        if slack is None or (estimate := self.estimate) is None:
            return None
        return step_token_budget(
            estimate,
            decode_rows=rows,
            decode_context=context,
            prefill_position=position // chunks if chunks else 0,
            slack=slack,
            max_num_batched_tokens=self._scheduler.config.max_num_batched_tokens,
        )

    def batch_limit(self) -> int:
        """Sequences that should run at once: `max_num_seqs`, or fewer where targets or memory ask for it."""
        scheduler = self._scheduler
        limit = scheduler.config.max_num_seqs
        if self._lengths >= _LENGTHS_TO_TRUST:
            mean = self._held / self._steps
            limit = memory_batch_limit(
                mean_tokens=mean + PAGE_SIZE / 2,  # half of the last page is empty
                deviation=max(0.0, self._held_squares / self._steps - mean * mean) ** 0.5,
                kv_tokens=scheduler.cache.total * PAGE_SIZE,
                limit=limit,
            )
        target, contexts = None, 0
        for sequence in scheduler.running:
            request = sequence.request
            for wanted in (request.tpot_ms, request.itl_ms):
                if wanted is not None:
                    target = wanted if target is None else min(target, wanted)
            contexts += sequence.computed
        if target is None or (estimate := self.estimate) is None:
            return limit
        return decode_batch_limit(
            estimate, target=target / 1e3, mean_context=contexts / len(scheduler.running), limit=limit
        )

    def _observe_life(self, prompt: int, output: int) -> None:
        """Learn the KV tokens that a running request holds: from `prompt` to `prompt + output`, one more each step.

        A request counts by its steps, as it does in the batch that a look at a random moment finds.
        """
        self._lengths += 1
        self._steps = _LENGTH_MEMORY * self._steps + output
        self._held = _LENGTH_MEMORY * self._held + output * (prompt + output / 2)
        square = prompt * prompt + prompt * output + output * output / 3
        self._held_squares = _LENGTH_MEMORY * self._held_squares + output * square
