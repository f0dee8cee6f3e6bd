"""The fair queue's actor without Ray around it: answers, withdrawals, gateways that fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from policies.tickets import EngineReport, Grant, Refusal, Ticket
from serve_app import fair_queue
from serve_app.fair_queue import FairQueueActor, FairQueueSpec


def spec(**changes: Any) -> FairQueueSpec:
    fields: dict[str, Any] = {
        "model": "m",
        "engines": (),
        "policy": "vtc",
        "locality_window": 0.0,
        "max_queued_requests": 100,
        "max_queued_per_tenant": 100,
        "max_queued_tokens": 10_000,
        "max_queued_tokens_per_tenant": 10_000,
        "waiting_timeout_ms": 60_000.0,
    }
    return FairQueueSpec(**(fields | changes))


def ticket(request: str, attempt: int = 1) -> Ticket:
    return Ticket(request, attempt, "a", 1.0, input_tokens=10, predicted_output_tokens=5)


def report(step: int) -> EngineReport:
    """An empty engine with two slots."""
    return EngineReport(
        engine="e0",
        engine_epoch=1,
        step=step,
        served={},
        outstanding={},
        running=0,
        waiting=0,
        waiting_prefill_tokens=0,
        max_num_seqs=2,
        max_num_batched_tokens=100,
        free_pages=100,
        total_pages=100,
        page_size=16,
    )


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 10.0)


@pytest.fixture
async def actor() -> AsyncIterator[FairQueueActor]:
    actor = FairQueueActor(spec())
    await actor.renew("owner")
    yield actor
    for task in actor._tasks:
        task.cancel()


async def test_each_waiting_gateway_gets_its_grant(actor: FairQueueActor) -> None:
    asked = [asyncio.create_task(actor.enqueue(ticket(f"r{i}"), f"g{i}")) for i in range(3)]
    await until(lambda: len(actor._queue) == 3)
    actor._queue.observe_report(report(1))
    await until(lambda: sum(task.done() for task in asked) == 2)
    answers = [task.result() for task in asked if task.done()]
    assert all(isinstance(answer, Grant) for answer in answers)
    assert len(actor._queue) == 1
    [last] = [task for task in asked if not task.done()]
    await actor.withdraw(f"r{asked.index(last)}", 1)
    refusal = await last
    assert isinstance(refusal, Refusal) and refusal.code == "cancelled"


async def test_asking_again_ends_the_older_call(actor: FairQueueActor) -> None:
    first = asyncio.create_task(actor.enqueue(ticket("r"), "g"))
    await until(lambda: len(actor._queue) == 1)
    second = asyncio.create_task(actor.enqueue(ticket("r"), "g"))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(first, 5.0)
    assert len(actor._queue) == 1
    actor._queue.observe_report(report(1))
    assert isinstance(await asyncio.wait_for(second, 5.0), Grant)


async def test_tickets_of_a_silent_gateway_leave_and_others_stay(
    actor: FairQueueActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = [asyncio.create_task(actor.enqueue(ticket(f"dead{i}"), "dead")) for i in range(5)]
    alive = asyncio.create_task(actor.enqueue(ticket("alive"), "alive"))
    await until(lambda: len(actor._queue) == 6)
    monkeypatch.setattr(fair_queue, "GATEWAY_LEASE_SECONDS", 1.0)

    async def renew() -> None:
        while True:
            await actor.snapshot("alive")
            await asyncio.sleep(0.05)

    renewing = asyncio.create_task(renew())
    await until(lambda: all(task.done() for task in dead))
    assert all(task.cancelled() for task in dead) and not alive.done()
    assert (await actor.snapshot("alive")).queued == 1
    actor._queue.observe_report(report(1))
    grant = await asyncio.wait_for(alive, 5.0)
    assert isinstance(grant, Grant) and grant.request == "alive"
    renewing.cancel()


async def test_a_successor_goes_on_with_the_counters() -> None:
    first = FairQueueActor(spec())
    first._queue.observe_report(report(1))
    served = EngineReport(**{**vars(report(2)), "served": {"a": 50.0}})
    first._queue.observe_report(served)
    successor = FairQueueActor(spec(restored=await first.export_state()))
    assert (await successor.snapshot("g")).tenants["a"].served == 50.0
