"""The step loop: a thread that schedules, runs and commits, one step after another.

With asynchronous scheduling two steps are in flight: each is scheduled and handed to the runner while the one before
runs, and that one's result is committed then.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_actor.executor import PAGE_SIZE, Runner
from engine_actor.request import EngineRequest, StreamRow
from engine_actor.scheduler import Scheduler
from engine_actor.step import StepRecord, StepResult
from engine_actor.step_control import StepControl

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long an idle loop waits for work before it reports again."""


@dataclass(frozen=True)
class StepOutcome:
    """What one turn of the loop did. `record` and `result` are of the step it committed, None without one.

    `accepted` names the tickets whose requests were taken. `scheduler_seconds` is the time outside the runner,
    `step_seconds` the time since the step was scheduled or, if that is later, since the step before it was committed.
    """

    rows: list[StreamRow]
    accepted: list[tuple[str, int]]
    record: StepRecord | None = None
    result: StepResult | None = None
    scheduler_seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class _Flight:
    """A step that was begun at `begin`, and what waits for its result."""

    record: StepRecord
    begin: float
    wait: Callable[[], StepResult]


class EngineLoop:
    """Drives scheduler and runner in a thread of its own; everything else talks to it through a queue.

    `on_outcome` is called in that thread after every turn and must not block. When a step raises, the loop ends and
    `on_failure` gets the exception: the state of the step is unknown, so nothing can be saved.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        control: StepControl,
        on_outcome: Callable[[StepOutcome], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._control = control
        self._flights: deque[_Flight] = deque()
        self._depth = 2 if scheduler.config.async_scheduling else 1
        self._on_outcome = on_outcome
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._accepted: list[tuple[str, int]] = []
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self.last_progress = time.monotonic()
        """Monotonic seconds of the last step on the way to a new token, or of the last moment without any work."""
        self._computing = False
        self._committed = self.last_progress
        self._served = 0
        self._served_nothing = 0  # tokens computed since the last new one

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the loop after the steps in flight. Live requests get no further rows."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def why_stalled(self) -> str:
        """What is going on while `last_progress` stands, in an operator's words. Thread-safe."""
        scheduler = self._scheduler
        cache = scheduler.cache
        if self._computing:
            reason = "a step does not come back from the model"
        elif scheduler.num_running:
            reason = "steps compute again what was preempted, and nothing new"
        else:
            reason = "no waiting request can be started"
        return (
            f"{reason}; {scheduler.num_running} requests run, {scheduler.num_waiting} wait, "
            f"{cache.available} of {cache.total} KV pages can be had"
        )

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: EngineRequest) -> None:
        """Hand a request over; its rows come through `on_outcome`. Thread-safe.

        It is accepted now: the step in flight, which it has to wait for, is the engine's own time.
        """
        now = time.monotonic()
        self._inbox.put(lambda: self._submit(request, now))

    def abort(self, request: str, attempt: int) -> None:
        """Ask for the end of a request; unknown ones are ignored. Thread-safe."""
        self._inbox.put(lambda: self._scheduler.abort(request, attempt))

    def _submit(self, request: EngineRequest, now: float) -> None:
        self._scheduler.submit(request, now)
        self._accepted.append((request.ticket, request.attempt))

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._turn()
            for flight in self._flights:
                flight.wait()
        except BaseException as error:
            logger.exception("the engine loop ends: a step failed")
            self._on_failure(error)

    def _read_inbox(self) -> bool:
        """Apply what has arrived; wait for it when there is nothing to compute. False: stop."""
        try:
            while True:
                block = not self._scheduler.has_work
                command = self._inbox.get(block=block, timeout=IDLE_SECONDS if block else None)
                if command is None:
                    return False
                command()
        except queue.Empty:
            return True

    def _turn(self) -> None:
        begin = time.monotonic()
        record = self._scheduler.schedule(begin, self._control.token_budget(begin))
        scheduled = time.monotonic()
        self._computing = True
        if record is not None:
            self._flights.append(_Flight(record, begin, self._runner.start(record)))
            if len(self._flights) < self._depth:
                return
        rows = self._scheduler.take_finished()
        accepted, self._accepted = self._accepted, []
        if not self._flights:
            self._computing = False
            if self._scheduler.has_work:
                time.sleep(IDLE_SECONDS / 50)  # nothing fits just now: no progress, and health will tell
            else:
                self.last_progress = begin
            self._on_outcome(StepOutcome(rows, accepted))
            return
        flight = self._flights.popleft()
        result = flight.wait()
        self._computing = False
        ran = time.monotonic()
        rows += self._scheduler.commit(flight.record, result, ran)
        end = time.monotonic()
        seconds = end - max(flight.begin, self._committed)
        self._committed = end
        self._note_progress(flight.record, end)
        self._control.observe(flight.record, rows, seconds)
        scheduler_seconds = (scheduled - begin) + (end - ran)
        self._on_outcome(StepOutcome(rows, accepted, flight.record, result, scheduler_seconds, seconds))

    def _note_progress(self, record: StepRecord, end: float) -> None:
        """A step that serves no new token may compute lost ones again, but no more than the pool can have lost."""
        cache = self._scheduler.cache
        if self._scheduler.service.tokens != self._served:
            self._served = self._scheduler.service.tokens
            self._served_nothing = 0
        else:
            self._served_nothing += record.num_tokens
        if self._served_nothing <= cache.total * PAGE_SIZE:
            self.last_progress = end
