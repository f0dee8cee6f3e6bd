"""Tickets, reports and queues for tests, with every field that does not matter filled in."""

from __future__ import annotations

from typing import Any

from policies.fair_queue import FairQueue, QueuePolicy
from policies.latency_model import StepEstimate
from policies.tickets import EngineReport, Ticket


def make_queue(policy: QueuePolicy = "vtc", **changes: Any) -> FairQueue:
    arguments = {"queue_epoch": 3, "max_queued_requests": 1000, "max_queued_per_tenant": 1000} | changes
    return FairQueue(policy=policy, **arguments)


def ticket(request: str, tenant: str = "a", **changes: Any) -> Ticket:
    fields: dict[str, Any] = {"attempt": 0, "weight": 1.0, "input_tokens": 10, "predicted_output_tokens": 5}
    return Ticket(request=request, tenant=tenant, **(fields | changes))


def report(engine: str = "e0", **changes: Any) -> EngineReport:
    fields: dict[str, Any] = {
        "engine_epoch": 1,
        "step": 0,
        "served": {},
        "outstanding": {},
        "running": 0,
        "waiting": 0,
        "waiting_prefill_tokens": 0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "free_pages": 1000,
        "total_pages": 1000,
        "page_size": 16,
        "step_estimate": StepEstimate(1e-6, 1e-9, 1e-9, 0.0, 0.0, 0.0),
    }
    return EngineReport(engine=engine, **(fields | changes))


def granted(queue: FairQueue, now: float = 0.0) -> list[str]:
    """Every request that can be granted now, in order."""
    requests = []
    while (grant := queue.next_grant(now)) is not None:
        requests.append(grant.request)
    return requests
