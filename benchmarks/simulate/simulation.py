"""The event loop: arrivals, tickets, grants, engine steps and reports in virtual time.

Fair queue and scheduler are the product's own; this file stands in for what is between them: gateways, actors and
their messages.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from benchmarks.simulate.requests import Scenario, SimulatedRequest
from benchmarks.simulate.runner import END_TOKEN, CostModelRunner
from benchmarks.simulate.service_gap import MAX_TENANTS, ServiceGapMeter
from engine_actor.executor import PAGE_SIZE
from engine_actor.report import engine_report
from engine_actor.request import EngineRequest, SamplingParams, StreamRow
from engine_actor.scheduler import Scheduler
from engine_actor.step import StepRecord
from engine_actor.step_control import StepControl, step_features
from policies.fair_queue import FairQueue
from policies.page_hashes import page_hashes
from policies.service import DEFAULT_PRICES
from policies.tickets import Grant, Refusal, Ticket

HOP_SECONDS = 0.003
"""From a decision of the queue to the request in the engine: three actor calls of about 1 ms."""

RETRY_SECONDS = 0.01
"""How long an engine waits when it has work and nothing of it fits."""

MAX_RETRIES = 1000

TICK_SECONDS = 0.1
"""How often the fair queue's actor looks for what time alone has changed."""

STANDSTILL_SECONDS = 600.0

MAX_TOKENS = 4096
"""What every simulated client allows. Where its answer ends is not known before."""


@dataclass
class RequestOutcome:
    """What became of one request. `token_times` are virtual seconds; the first one makes the TTFT."""

    request: SimulatedRequest
    admitted: bool = False
    refusal: str | None = None
    cancelled: bool = False
    completed: bool = False
    engine: str | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.request.arrival_s if self.token_times else None

    @property
    def e2e_s(self) -> float | None:
        return self.token_times[-1] - self.request.arrival_s if self.completed else None


@dataclass
class SimulatedEngine:
    """One engine: the real scheduler and step control, a runner that only tells the time, the step in flight."""

    name: str
    scheduler: Scheduler
    control: StepControl
    runner: CostModelRunner
    in_flight: StepRecord | None = None
    accepted: list[tuple[str, int]] = field(default_factory=list)
    busy_seconds: float = 0.0
    decode_row_seconds: float = 0.0
    page_seconds: float = 0.0

    def observe(self, record: StepRecord, seconds: float) -> None:
        """Count a step: how long, with how many decode rows and KV pages in use."""
        cache = self.scheduler.cache
        self.busy_seconds += seconds
        self.decode_row_seconds += seconds * step_features(record).decode_rows
        self.page_seconds += seconds * (cache.total - cache.available)


@dataclass(frozen=True)
class Run:
    """One finished run. `seconds` is its end: the last token, or the scenario's horizon.

    `locality_window` is the fair queue's, in priced tokens per weight.
    """

    outcomes: list[RequestOutcome]
    engines: list[SimulatedEngine]
    gap: ServiceGapMeter
    seconds: float
    output_tokens: int
    locality_window: float = 0.0


class Simulation:
    """Runs one scenario on a queue and the engines it grants to. Use once.

    `last_positions` is filled here and read by the engines' runners.
    """

    def __init__(
        self,
        scenario: Scenario,
        queue: FairQueue,
        engines: list[SimulatedEngine],
        last_positions: dict[int, int],
        *,
        waiting_timeout_s: float | None = None,
        locality_window: float = 0.0,
    ) -> None:
        self._scenario = scenario
        self._queue = queue
        self._engines = {engine.name: engine for engine in engines}
        self._last_positions = last_positions
        self._waiting_timeout_s = waiting_timeout_s
        self._locality_window = locality_window
        self._outcomes = [RequestOutcome(request) for request in scenario.requests]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._waiting: dict[str, int] = {}
        self._emptied: set[str] = set()
        batch = {request.tenant for request in scenario.requests if request.service_class == "batch"}
        self._gap = ServiceGapMeter(_compared_tenants(scenario), batch)
        self._unfinished = len(self._outcomes)
        self._output_tokens = 0
        self._last_token_at = 0.0
        self._reported_at = 0.0

    def run(self) -> Run:
        """Raises ValueError if a request can never run on these engines."""
        for engine in self._engines.values():
            self._queue.observe_report(engine_report(engine.name, engine.scheduler, engine.control))
        for index, request in enumerate(self._scenario.requests):
            self._at(request.arrival_s, partial(self._arrive, index))
            if request.cancel_after_s is not None:
                self._at(request.arrival_s + request.cancel_after_s, partial(self._cancel, index))
        self._at(TICK_SECONDS, self._tick)
        horizon = self._scenario.horizon_s
        while self._events and self._unfinished:
            now, _, action = heapq.heappop(self._events)
            if horizon is not None and now > horizon:
                break
            action(now)
        seconds = self._last_token_at if horizon is None else horizon
        return Run(
            self._outcomes,
            list(self._engines.values()),
            self._gap,
            seconds,
            self._output_tokens,
            self._locality_window,
        )

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    # Gateway --------------------------------------------------------------------------------------------------

    def _arrive(self, index: int, now: float) -> None:
        request = self._outcomes[index].request
        ticket = Ticket(
            request=str(index),
            attempt=0,
            tenant=request.tenant,
            weight=request.weight,
            input_tokens=request.input_tokens,
            predicted_output_tokens=self._queue.output_lengths.of(request.tenant).expected(MAX_TOKENS),
            service_class=request.service_class,
            remaining_ttft_ms=_milliseconds(request.slo_ttft_s),
            remaining_deadline_ms=_milliseconds(request.slo_deadline_s),
            output_tokens_bound=self._queue.output_lengths.of(request.tenant).bound(MAX_TOKENS),
            page_hashes=self._page_hashes(index),
            kv_share=request.kv_share,
        )
        refusal = self._queue.push(ticket, now)
        if refusal is not None:
            self._refuse(refusal)
            return
        self._waiting[request.tenant] = self._waiting.get(request.tenant, 0) + 1
        self._pump(now)

    def _cancel(self, index: int, now: float) -> None:
        outcome = self._outcomes[index]
        if outcome.completed or outcome.refusal is not None:
            return
        outcome.cancelled = True
        self._unfinished -= 1
        self._queue.withdraw(str(index), 0)
        if not outcome.admitted:
            self._left(outcome)
        elif outcome.engine is not None:
            self._engines[outcome.engine].scheduler.abort(str(index), 0)
            self._step(self._engines[outcome.engine], now)
        self._pump(now)

    def _submit(self, index: int, grant: Grant, now: float) -> None:
        outcome = self._outcomes[index]
        if outcome.cancelled:
            return
        request = outcome.request
        engine = self._engines[grant.engine]
        outcome.engine = grant.engine
        prompt = request.prompt_token_ids(index)
        self._last_positions[index] = len(prompt) + request.output_tokens - 1
        engine.scheduler.submit(
            EngineRequest(
                request=str(index),
                attempt=0,
                ticket=str(index),
                tenant=request.tenant,
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    max_tokens=MAX_TOKENS, temperature=0.0, seed=index, stop_token_ids=(END_TOKEN,)
                ),
                namespace=request.tenant,
                weight=request.weight,
                kv_share=request.kv_share,
                predicted_output_tokens=self._queue.output_lengths.of(request.tenant).expected(MAX_TOKENS),
                queue_epoch=grant.queue_epoch,
                tpot_ms=_milliseconds(request.slo_tpot_s),
            ),
            now,
        )
        engine.accepted.append((str(index), 0))
        self._step(engine, now)

    def _page_hashes(self, index: int) -> tuple[int, ...]:
        """What can be found in a prefix cache; prompts that share nothing need no names."""
        request = self._outcomes[index].request
        if not request.prefix_blocks:
            return ()
        return page_hashes(request.tenant, request.prompt_token_ids(index), PAGE_SIZE)

    # Fair queue -----------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        while (grant := self._queue.next_grant(now)) is not None:
            outcome = self._outcomes[int(grant.request)]
            outcome.admitted = True
            self._left(outcome)
            self._at(now + HOP_SECONDS, partial(self._submit, int(grant.request), grant))

    def _tick(self, now: float) -> None:
        refusals = self._queue.break_promises(now)
        if self._waiting_timeout_s is not None:
            refusals += [
                Refusal(ticket.request, ticket.attempt, "queue_timeout", "")
                for ticket in self._queue.expire(now, self._waiting_timeout_s * 1e3)
            ]
        for refusal in refusals:
            self._left(self._outcomes[int(refusal.request)])
            self._refuse(refusal)
        self._pump(now)
        if len(self._queue) and now - self._reported_at > STANDSTILL_SECONDS:
            raise RuntimeError(
                f"nobody is granted entry since {self._reported_at:.3f} s; {len(self._queue)} wait"
            )
        self._at(now + TICK_SECONDS, self._tick)

    def _left(self, outcome: RequestOutcome) -> None:
        """A ticket has left the queue."""
        tenant = outcome.request.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            self._emptied.add(tenant)

    def _refuse(self, refusal: Refusal) -> None:
        self._outcomes[int(refusal.request)].refusal = refusal.code
        self._unfinished -= 1

    # Engine ---------------------------------------------------------------------------------------------------

    def _step(self, engine: SimulatedEngine, now: float) -> None:
        """Begin a step if none is in flight and there is work."""
        if engine.in_flight is not None or not engine.scheduler.has_work:
            return
        record = engine.scheduler.schedule(now, engine.control.token_budget(now))
        self._take_rows(engine.scheduler.take_finished(), now)
        if record is None:
            self._report(engine, now)
            if (
                engine.scheduler.has_work
            ):  # everybody gave up pages; as the engine's loop does, try again shortly
                self._at(now + RETRY_SECONDS, partial(self._step, engine))
            return
        engine.in_flight = record
        result = engine.runner.run(record)

        def end(now: float) -> None:
            engine.in_flight = None
            engine.observe(record, result.model_seconds)
            rows = engine.scheduler.commit(record, result, now)
            engine.control.observe(record, rows, result.model_seconds)
            self._take_rows(rows, now)
            self._report(engine, now)
            self._step(engine, now)

        self._at(now + result.model_seconds, end)

    def _report(self, engine: SimulatedEngine, now: float) -> None:
        accepted, engine.accepted = tuple(engine.accepted), []
        report = engine_report(engine.name, engine.scheduler, engine.control, accepted=accepted)
        self._queue.observe_report(report, now)
        self._reported_at = now
        self._gap.observe(now, self._served(), self._waiting, self._emptied)
        self._emptied.clear()
        self._pump(now)

    def _take_rows(self, rows: list[StreamRow], now: float) -> None:
        for row in rows:
            outcome = self._outcomes[int(row.request)]
            outcome.token_times.extend([now] * len(row.token_ids))
            self._output_tokens += len(row.token_ids)
            self._last_token_at = now
            if row.finish_reason == "error":
                raise ValueError(f"request {row.request} of the scenario cannot run: {row.error}")
            if row.finish_reason in ("stop", "length"):
                outcome.completed = not outcome.cancelled
                self._unfinished -= outcome.completed
                self._queue.output_lengths.observe(outcome.request.tenant, len(outcome.token_times))
                del self._last_positions[int(row.request)]

    def _served(self) -> dict[str, float]:
        engines = list(self._engines.values())
        served = engines[0].scheduler.served
        if len(engines) == 1:
            return served
        return {
            tenant: sum(engine.scheduler.served.get(tenant, 0.0) for engine in engines)
            for tenant in {name for engine in engines for name in engine.scheduler.served}
        }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _compared_tenants(scenario: Scenario) -> dict[str, float]:
    """Weights of the tenants whose service is compared: those that ask for most."""
    demand: dict[str, float] = {}
    weights: dict[str, float] = {}
    for request in scenario.requests:
        cost = DEFAULT_PRICES.cost(computed_input=request.input_tokens, output=request.output_tokens)
        demand[request.tenant] = demand.get(request.tenant, 0.0) + cost
        weights[request.tenant] = request.weight
    chosen = sorted(demand, key=lambda tenant: -demand[tenant])[:MAX_TENANTS]
    return {tenant: weights[tenant] for tenant in sorted(chosen)}
