"""One engine pool in virtual time: the real fair queue, scheduler and step control over a made-up step time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine_actor.report import engine_report
from engine_actor.request import EngineRequest, SamplingParams
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepResult
from engine_actor.step_control import StepControl, step_features
from policies.fair_queue import FairQueue, QueuePolicy
from policies.latency_model import StepEstimate, StepFeatures, StepTimeModel
from policies.tickets import Refusal, ServiceClass, Ticket

SPEED = StepEstimate(2e-3, 1.2e-4, 4e-4, 1.5e-7, 1e-8, 0.0)
HOP_SECONDS = 0.002  # from a grant to the engine
TICK_SECONDS = 0.1


@dataclass
class Offered:
    """One request and what became of it; times in s since it came."""

    tenant: str
    at: float
    tokens: tuple[int, int]
    ttft: float | None
    deadline: float | None
    refusal: str | None = None
    demoted: bool = False
    first_token: float | None = None
    end: float | None = None

    @property
    def admitted(self) -> bool:
        """A promise was given."""
        return not self.demoted and self.refusal in (None, "deadline_exceeded")

    @property
    def met(self) -> bool:
        first, end = self.first_token, self.end
        return (self.ttft is None or (first is not None and first <= self.ttft)) and (
            self.deadline is None or (end is not None and end <= self.deadline)
        )


class VirtualPool:
    """`offer` what comes, `run` to the end, read `offered`. `slowness` multiplies step times at a time."""

    def __init__(
        self, policy: QueuePolicy = "vtc", *, slots: int = 16, budget: int = 128, seed: int = 0
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.scheduler = Scheduler(SchedulerConfig(slots, budget, 8192, prefill_chunk_size=budget), 4096)
        model = StepTimeModel()
        for step in 6 * [StepFeatures(budget, 0, 0, budget * 300.0), StepFeatures(0, slots, slots * 200)]:
            model.observe(step, SPEED.seconds(step))
        self.control = StepControl(self.scheduler, model)
        self.queue = FairQueue(
            queue_epoch=1, policy=policy, max_queued_requests=10**6, max_queued_per_tenant=10**5
        )
        self.offered: dict[str, Offered] = {}
        self.slowness: Callable[[float], float] = lambda now: 1.0
        self._now = 0.0
        self._next_tick = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._accepted: list[tuple[str, int]] = []

    def poisson(
        self, tenant: str, rate: float, start: float, end: float, tokens: tuple[int, int], **fields: object
    ) -> None:
        """Requests per second from `start` to `end`; lengths are uniform in half to one and a half `tokens`."""
        at = start
        while (at := at + self.rng.exponential(1 / rate)) < end:
            n_in, n_out = (max(2, int(n * self.rng.uniform(0.5, 1.5))) for n in tokens)
            self.offer(at, tenant, (n_in, n_out), predicted=tokens[1], **fields)  # type: ignore[arg-type]

    def offer(
        self,
        at: float,
        tenant: str,
        tokens: tuple[int, int],
        *,
        predicted: int,
        ttft: float | None = None,
        deadline: float | None = None,
        service_class: ServiceClass = "default",
        demotable: bool = False,
    ) -> None:
        name = f"r{len(self.offered)}"
        record = self.offered[name] = Offered(tenant, at, tokens, ttft, deadline)
        ticket = Ticket(
            name,
            1,
            tenant,
            1.0,
            tokens[0],
            predicted,
            service_class=service_class,
            remaining_ttft_ms=None if ttft is None else ttft * 1e3,
            remaining_deadline_ms=None if deadline is None else deadline * 1e3,
            demotable=demotable,
            output_tokens_bound=tokens[1],
        )

        def arrive() -> None:
            answer = self.queue.push(ticket, self._now)
            record.refusal = answer.code if isinstance(answer, Refusal) else None

        self._at(at, arrive)

    def run(self) -> None:
        while self._events or len(self.queue) or self.scheduler.has_work:
            self._handle(self._now)
            record = self.scheduler.schedule(self._now, self.control.token_budget(self._now))
            self.scheduler.take_finished()
            if record is None:
                self._now = max(self._now, min(self._next_tick, self._events[0][0] if self._events else 1e9))
                self._report()
                continue
            seconds = SPEED.seconds(step_features(record)) * self.slowness(self._now)
            seconds *= float(self.rng.lognormal(0.0, 0.08))
            end = self._now + seconds
            self._handle(end)  # what comes during the step
            self._now = end
            sampled = int(record.is_last_chunk.sum())
            result = StepResult(record.step, np.ones(sampled, np.int32), np.ones(sampled, np.bool_), seconds)
            rows = self.scheduler.commit(record, result, end)
            self.control.observe(record, rows, seconds)
            for row in rows:
                offered = self.offered[row.request]
                offered.first_token = offered.first_token or end - offered.at
                offered.end = end - offered.at
            self._report()

    def share_met(self, tenant: str | None = None, *, admitted: bool) -> float:
        """Deadlines met, as a share of those promised, or of all that were offered."""
        asked = [
            o
            for o in self.offered.values()
            if (o.ttft or o.deadline) and tenant in (None, o.tenant) and (o.admitted or not admitted)
        ]
        return sum(o.met for o in asked) / max(1, len(asked))

    def _report(self) -> None:
        accepted, self._accepted = tuple(self._accepted), []
        report = engine_report("e0", self.scheduler, self.control, accepted=accepted)
        self.queue.observe_report(report, self._now)
        self._grant()

    def _grant(self) -> None:
        while (grant := self.queue.next_grant(self._now)) is not None:
            offered, name, attempt = self.offered[grant.request], grant.request, grant.attempt
            offered.demoted = grant.demoted
            request = EngineRequest(
                request=name,
                attempt=attempt,
                ticket=name,
                tenant=offered.tenant,
                prompt_token_ids=[1] * offered.tokens[0],
                sampling=SamplingParams(max_tokens=offered.tokens[1]),
                namespace=name,
                predicted_output_tokens=offered.tokens[1],
            )

            def submit(request: EngineRequest = request) -> None:
                self.scheduler.submit(request, self._now)
                self._accepted.append((request.request, request.attempt))

            self._at(self._now + HOP_SECONDS, submit)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, len(self._events) + int(time * 1e9), event))

    def _handle(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now = max(self._now, self._events[0][0])
            heapq.heappop(self._events)[2]()
            self._grant()
        if self._now >= self._next_tick:
            self._next_tick = self._now + TICK_SECONDS
            for refusal in self.queue.break_promises(self._now):
                self.offered[refusal.request].refusal = refusal.code
            self._grant()
