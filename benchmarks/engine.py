"""Drives a workload through the engine's own step loop, in this process: no HTTP, no Ray cluster."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from benchmarks.workload import BenchmarkError, BenchmarkRequest
from engine_actor.build import BuiltEngine
from engine_actor.loop import EngineLoop, StepOutcome
from engine_actor.request import EngineRequest, SamplingParams, StreamRow
from engine_actor.scheduler import Scheduler
from engine_actor.step import StepRecord
from engine_actor.step_control import StepControl


@dataclass
class RequestLog:
    """What one request got: its tokens, and when each came, in seconds since the start of the run."""

    arrival: float
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass
class RunLog:
    """One run of a workload. `requests` are in the workload's order; times are in seconds."""

    requests: list[RequestLog]
    steps: int = 0
    scheduler_seconds: float = 0.0
    model_seconds: float = 0.0
    preemptions: int = 0
    cpu_seconds: float = 0.0
    records: list[StepRecord] = field(default_factory=list)
    part_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the start to the last token."""
        return max(request.token_times[-1] for request in self.requests)


def run_workload(built: BuiltEngine, requests: list[BenchmarkRequest]) -> RunLog:
    """Run every request to its full length, greedily, each submitted when it arrives.

    Scheduler and KV cache are new, so nothing that ran before is in the prefix cache. Requests that arrive
    at 0 are handed over before the first step: the same workload makes the same steps. Raises BenchmarkError
    when the engine fails.
    """
    scheduler = Scheduler(built.scheduler, built.runner.num_pages)
    recorder = _Recorder(requests)
    before = built.executor.part_seconds if built.executor is not None else {}
    loop = EngineLoop(
        scheduler, built.runner, StepControl(scheduler), recorder.on_outcome, recorder.on_failure
    )
    in_order = sorted(enumerate(requests), key=lambda item: item[1].arrival_s)
    started = False
    cpu_before = time.process_time()
    try:
        for index, request in in_order:
            if request.arrival_s > 0:
                if not started:
                    recorder.start()
                    loop.start()
                    started = True
                if recorder.done.wait(recorder.started + request.arrival_s - time.monotonic()):
                    break  # it failed
            loop.submit(_engine_request(str(index), request))
        if not started:
            recorder.start()
            loop.start()
        recorder.done.wait()
        recorder.log.cpu_seconds = time.process_time() - cpu_before
    finally:
        if loop.alive:
            loop.stop()
    if recorder.failure is not None:
        raise BenchmarkError(recorder.failure)
    recorder.log.preemptions = scheduler.preemptions
    if built.executor is not None:
        after = built.executor.part_seconds
        recorder.log.part_seconds = {name: after[name] - before[name] for name in after}
    return recorder.log


class _Recorder:
    """Takes the outcomes of the step loop, in its thread."""

    def __init__(self, requests: list[BenchmarkRequest]) -> None:
        self.done = threading.Event()
        self.failure: str | None = None
        self.started = 0.0
        self.log = RunLog([RequestLog(request.arrival_s) for request in requests])
        self._unfinished = len(requests)

    def start(self) -> None:
        self.started = time.monotonic()

    def on_outcome(self, outcome: StepOutcome) -> None:
        now = time.monotonic() - self.started
        if outcome.record is not None and outcome.result is not None:
            self.log.steps += 1
            self.log.records.append(outcome.record)
            self.log.scheduler_seconds += outcome.scheduler_seconds
            self.log.model_seconds += outcome.result.model_seconds
        for row in outcome.rows:
            self._on_row(row, now)

    def on_failure(self, error: BaseException) -> None:
        self._fail(f"the engine failed: {type(error).__name__}: {error}")

    def _on_row(self, row: StreamRow, now: float) -> None:
        request = self.log.requests[int(row.request)]
        request.token_ids += row.token_ids
        request.token_times += [now] * len(row.token_ids)
        if row.finish_reason is None:
            return
        if row.finish_reason != "length":
            self._fail(f"request {row.request} ended with {row.finish_reason!r}: {row.error}")
            return
        if row.usage is not None:
            request.cached_tokens = row.usage.cached_input
        self._unfinished -= 1
        if not self._unfinished:
            self.done.set()

    def _fail(self, message: str) -> None:
        self.failure = self.failure or message
        self.done.set()


def _engine_request(name: str, request: BenchmarkRequest) -> EngineRequest:
    """Greedy and without end tokens: every request runs to its max_tokens."""
    return EngineRequest(
        request=name,
        attempt=0,
        ticket=name,
        tenant=request.tenant,
        prompt_token_ids=request.prompt_token_ids,
        predicted_output_tokens=request.max_tokens,
        sampling=SamplingParams(max_tokens=request.max_tokens, temperature=0.0),
    )
