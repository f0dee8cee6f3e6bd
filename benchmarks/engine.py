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
    step_seconds: list[float] = field(default_factory=list)
    """Of each record: from the end of the step before it to its own end."""
    part_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the start to the last token."""
        return max(request.token_times[-1] for request in self.requests)


def run_workload(
    built: BuiltEngine,
    requests: list[BenchmarkRequest],
    sequential: bool = False,
    scheduler: Scheduler | None = None,
) -> RunLog:
    """Run every request to its full length, greedily, each submitted when it arrives.

    `sequential` submits each when the one before it has ended, in the workload's order, and ignores arrivals.
    Without a `scheduler` it is new, and so nothing that ran before is in the prefix cache. Requests that arrive
    at 0 are handed over before the first step: the same workload makes the same steps. Raises BenchmarkError
    when the engine fails.
    """
    scheduler = scheduler or Scheduler(built.scheduler, built.runner.num_pages)
    preemptions, attempt = scheduler.preemptions, scheduler.step  # a scheduler takes a request's attempt once
    recorder = _Recorder(requests)
    before = built.executor.part_seconds if built.executor is not None else {}
    loop = EngineLoop(
        scheduler, built.runner, StepControl(scheduler), recorder.on_outcome, recorder.on_failure
    )
    cpu_before = time.process_time()
    try:
        if sequential:
            _submit_in_turn(loop, recorder, requests, attempt)
        else:
            _submit_on_arrival(loop, recorder, requests, attempt)
        recorder.done.wait()
        recorder.log.cpu_seconds = time.process_time() - cpu_before
    finally:
        if loop.alive:
            loop.stop()
    if recorder.failure is not None:
        raise BenchmarkError(recorder.failure)
    recorder.log.preemptions = scheduler.preemptions - preemptions
    if built.executor is not None:
        after = built.executor.part_seconds
        recorder.log.part_seconds = {name: after[name] - before[name] for name in after}
    return recorder.log


def _submit_on_arrival(
    loop: EngineLoop, recorder: _Recorder, requests: list[BenchmarkRequest], attempt: int
) -> None:
    """Start the loop and hand over every request at its time."""
    started = False
    for index, request in sorted(enumerate(requests), key=lambda item: item[1].arrival_s):
        if request.arrival_s > 0:
            if not started:
                recorder.start()
                loop.start()
                started = True
            if recorder.done.wait(recorder.started + request.arrival_s - time.monotonic()):
                return  # it failed
        loop.submit(_engine_request(str(index), attempt, request))
    if not started:
        recorder.start()
        loop.start()


def _submit_in_turn(
    loop: EngineLoop, recorder: _Recorder, requests: list[BenchmarkRequest], attempt: int
) -> None:
    """Start the loop and hand over every request when the one before it has ended, or nothing more after a failure."""
    recorder.start()
    loop.start()
    for index, request in enumerate(requests):
        recorder.log.requests[index].arrival = time.monotonic() - recorder.started
        loop.submit(_engine_request(str(index), attempt, request))
        recorder.ended.acquire()
        if recorder.failure is not None:
            return


class _Recorder:
    """Takes the outcomes of the step loop, in its thread."""

    def __init__(self, requests: list[BenchmarkRequest]) -> None:
        self.done = threading.Event()
        self.ended = threading.Semaphore(0)  # counts requests that ended, and a failure
        self.failure: str | None = None
        self.started = 0.0
        self.log = RunLog([RequestLog(request.arrival_s) for request in requests])
        self._unfinished = len(requests)
        self._step_ended = 0.0

    def start(self) -> None:
        self.started = time.monotonic()

    def on_outcome(self, outcome: StepOutcome) -> None:
        now = time.monotonic() - self.started
        if outcome.record is not None and outcome.result is not None:
            self.log.steps += 1
            self.log.records.append(outcome.record)
            self.log.step_seconds.append(now - self._step_ended)
            self._step_ended = now
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
        self.ended.release()

    def _fail(self, message: str) -> None:
        self.failure = self.failure or message
        self.done.set()
        self.ended.release()


def _engine_request(name: str, attempt: int, request: BenchmarkRequest) -> EngineRequest:
    """Greedy and without end tokens: every request runs to its max_tokens."""
    return EngineRequest(
        request=name,
        attempt=attempt,
        ticket=name,
        tenant=request.tenant,
        prompt_token_ids=request.prompt_token_ids,
        predicted_output_tokens=request.max_tokens,
        sampling=SamplingParams(max_tokens=request.max_tokens, temperature=0.0),
    )
