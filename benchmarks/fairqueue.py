"""`evenhand bench fairqueue`: what the fair queue's operations cost, in CPU time of one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from policies.fair_queue import FairQueue
from policies.latency_model import StepEstimate
from policies.tickets import EngineReport, Ticket

T = TypeVar("T")

SLOTS = 256
PROMISED_EVERY = 5
"""Every fifth request has a deadline."""

_GRANTS_PER_REPORT = 8
_SPEED = StepEstimate(0.005, 2e-5, 1e-4, 1e-8, 1e-9, 0.2)
_HOURS_MS = 100 * 3_600_000.0


def run(queued: int, tenants: int, operations: int) -> dict[str, Any]:
    """Fill a queue, then grant one request and queue another, `operations` times. Times are means.

    Half of the requests are interactive, a fifth has a deadline. An engine of 256 slots reports every 8 grants;
    reports are counted on their own. `ms_per_walk` is an arrival with a deadline, the feasibility walk in it,
    `us_per_enqueue` one without; `us_per_blocked_decision` the answer that nobody can go, with every slot taken.
    """
    bench = _Bench(queued, tenants)
    enqueue: list[float] = []
    walk: list[float] = []
    decision = report = 0.0
    for number in range(operations):
        if number % _GRANTS_PER_REPORT == 0:
            state = bench.report()
            report += _timed(lambda state=state: bench.queue.observe_report(state, bench.now))[0]  # type: ignore[misc]
        seconds, grant = _timed(bench.grant)
        decision += seconds
        bench.take(grant.request, grant.attempt)
        ticket = bench.next_ticket()
        seconds, refusal = _timed(lambda ticket=ticket: bench.queue.push(ticket, bench.now))  # type: ignore[misc]
        assert refusal is None, refusal
        (enqueue if ticket.remaining_ttft_ms is None else walk).append(seconds)
    promises = len(bench.promised)
    bench.queue.observe_report(bench.report(free_slots=0), bench.now)
    while bench.grant() is not None:
        pass  # tenants under their share, of which the engine could still take two
    blocked = sum(_timed(bench.grant)[0] for _ in range(operations))
    return {
        "us_per_enqueue": round(_mean(enqueue) * 1e6, 1),
        "us_per_decision": round(decision / operations * 1e6, 1),
        "us_per_blocked_decision": round(blocked / operations * 1e6, 1),
        "us_per_report": round(report / (operations / _GRANTS_PER_REPORT) * 1e6, 1),
        "ms_per_walk": round(_mean(walk) * 1e3, 3),
        "queued": queued,
        "tenants": tenants,
        "promises": promises,
        "classes": 2,
        "operations": operations,
    }


class _Bench:
    """The queue, and an engine that takes every grant and ends its oldest request."""

    def __init__(self, queued: int, tenants: int) -> None:
        self._tenants = tenants
        self._pushed = 0
        self._step = 0
        self._live: list[str] = []
        self._served: dict[str, float] = {}
        self.granted: list[tuple[str, int]] = []
        self.queue = FairQueue(
            queue_epoch=1, policy="vtc", max_queued_requests=2 * queued, max_queued_per_tenant=queued
        )
        self.promised: set[str] = set()
        self.queue.observe_report(self.report())  # without a speed there are no promises
        for _ in range(queued):
            refusal = self.queue.push(self.next_ticket(), self.now)
            assert refusal is None, refusal

    @property
    def now(self) -> float:
        return self._pushed * 1e-3

    def next_ticket(self) -> Ticket:
        number = self._pushed
        self._pushed += 1
        has_deadline = number % PROMISED_EVERY == 0
        if has_deadline:
            self.promised.add(f"r{number}")
        return Ticket(
            f"r{number}",
            0,
            self._tenant(f"r{number}"),
            weight=1.0 + number % self._tenants % 4,
            input_tokens=50 + number * 37 % 600,
            predicted_output_tokens=16 + number * 17 % 200,
            service_class="interactive" if number % 2 else "default",
            remaining_ttft_ms=_HOURS_MS + number * 91 % 20_000 if has_deadline else None,
        )

    def grant(self) -> Any:
        return self.queue.next_grant(self.now)

    def take(self, request: str, attempt: int) -> None:
        """The engine gets a granted request."""
        self.promised.discard(request)
        self.granted.append((request, attempt))

    def report(self, free_slots: int = _GRANTS_PER_REPORT) -> EngineReport:
        """The engine has taken what was granted and served everything live a little."""
        self._step += 1
        self._live += [self._tenant(request) for request, _ in self.granted]
        self._live = self._live[-(SLOTS - _GRANTS_PER_REPORT) :]
        running: dict[str, int] = {}
        for tenant in self._live:
            running[tenant] = running.get(tenant, 0) + 1
            self._served[tenant] = self._served.get(tenant, 0.0) + 2.0
        accepted, self.granted = tuple(self.granted), []
        return EngineReport(
            engine="e0",
            engine_epoch=1,
            step=self._step,
            served=dict(self._served),
            outstanding={tenant: 300.0 * count - self._step % 7 for tenant, count in running.items()},
            running=len(self._live),
            waiting=0,
            waiting_prefill_tokens=0,
            max_num_seqs=len(self._live) + free_slots,
            max_num_batched_tokens=8192,
            free_pages=100_000,
            total_pages=200_000,
            page_size=16,
            accepted=accepted,
            step_estimate=_SPEED,
            live_sequences=running,
            tenant_pages={tenant: 20 * count for tenant, count in running.items()},
            remaining=tuple((1 + index % 200, 20) for index in range(len(self._live))),
        )

    def _tenant(self, request: str) -> str:
        return f"t{int(request[1:]) % self._tenants}"


def _timed(operation: Callable[[], T]) -> tuple[float, T]:
    begin = time.thread_time()
    result = operation()
    return time.thread_time() - begin, result


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
