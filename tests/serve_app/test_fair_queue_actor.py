"""What the fair queue's actor answers, called directly: protection lines, deadlines, asking twice, output lengths."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from policies.guardrails import ProtectionLines
from policies.latency_model import StepEstimate
from policies.output_length import DEFAULT_OUTPUT_LENGTH
from policies.tickets import EngineReport, Grant, Refusal, Ticket
from serve_app.fair_queue import FairQueueActor, FairQueueSpec
from serve_app.output_lengths import SharedOutputLengths

SPEC = FairQueueSpec(
    model="m",
    engines=("e0",),
    policy="vtc",
    locality_window=0.0,
    max_queued_requests=100,
    max_queued_per_tenant=100,
    max_queued_tokens=10**6,
    max_queued_tokens_per_tenant=10**6,
    waiting_timeout_ms=60_000.0,
)


def ticket(request: str, **fields: Any) -> Ticket:
    return Ticket(request, 1, "a", 1.0, 10, 5, **fields)


def hear(actor: FairQueueActor, step: int, **fields: Any) -> None:
    """A report of the engine, as it comes in."""
    defaults: dict[str, Any] = {
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
        "step_estimate": StepEstimate(5e-3, 1e-4, 1e-4, 0.0, 0.0, 0.1),
    }
    report = EngineReport(engine="e0", engine_epoch=1, step=step, **(defaults | fields))
    now = time.monotonic()
    actor._queue.observe_report(actor._rails.observe_report(report, now), now)


async def test_a_crossed_line_sheds_batch_work_and_nothing_else() -> None:
    actor = FairQueueActor(SPEC)
    hear(actor, 0)
    snapshot = await actor.snapshot("g", ProtectionLines(ttft_p95_ms=1e-6))
    assert snapshot.protection_step == 0
    assert isinstance(await actor.enqueue(ticket("early", service_class="batch"), "g"), Grant)
    for number in range(40):
        granted = await actor.enqueue(ticket(f"r{number}"), "g")
        assert isinstance(granted, Grant)
        hear(actor, number + 1, accepted=((f"r{number}", 1),), first_tokens=((f"r{number}", 1),))
    assert actor._rails.evaluate(time.monotonic()) == 1
    answer = await actor.enqueue(ticket("late", service_class="batch"), "g")
    assert isinstance(answer, Refusal) and answer.code == "overloaded" and "ttft_p95_ms" in answer.message
    assert isinstance(await actor.enqueue(ticket("n"), "g"), Grant)
    assert (await actor.snapshot("g")).protection_step == 1


async def test_a_deadline_is_refused_at_once_and_whoever_asked_before_hears_it_too() -> None:
    actor = FairQueueActor(SPEC)
    hear(actor, 0, running=8, live_sequences={"a": 8})  # every slot is its own
    first = asyncio.create_task(actor.enqueue(ticket("r"), "g"))
    await asyncio.sleep(0)
    assert not first.done()
    second = await actor.enqueue(ticket("r", remaining_ttft_ms=0.0), "g")
    assert isinstance(second, Refusal) and second.code == "deadline_unattainable"
    assert second.earliest_deadline_ms is not None
    assert await asyncio.wait_for(first, 10) == second
    assert (await actor.snapshot("g")).queued == 0


async def test_gateways_share_what_they_learn_of_output_lengths_and_a_successor_knows_it() -> None:
    actor = FairQueueActor(SPEC)
    here, there = SharedOutputLengths(), SharedOutputLengths()
    for _ in range(30):
        here.observe("a", 400)
    await actor.snapshot("here", None, here.take_untold())
    assert here.take_untold() == ()
    there.learn((await actor.snapshot("there")).output_lengths)
    assert there.of("a").bound(1000) == 400 and there.of("a").expected(1000) > 390
    assert there.of("a").expected(100) == 100 and there.of("b") == DEFAULT_OUTPUT_LENGTH

    successor = FairQueueActor(replace(SPEC, restored=await actor.export_state()))
    assert (await successor.snapshot("there")).output_lengths == {"a": there.of("a")}


def test_what_the_queue_did_not_hear_is_told_again_in_order() -> None:
    lengths = SharedOutputLengths()
    lengths.observe("a", 1)
    lengths.observe("a", 2)
    untold = lengths.take_untold()
    lengths.observe("b", 3)
    lengths.put_back(untold)
    assert lengths.take_untold() == (("a", 1), ("a", 2), ("b", 3))


async def test_with_a_locality_window_the_cached_prefix_goes_before_its_turn() -> None:
    for window, first in ((0.0, "cold"), (1000.0, "warm")):
        actor = FairQueueActor(replace(SPEC, locality_window=window))
        asked = {
            "cold": asyncio.create_task(actor.enqueue(Ticket("cold", 1, "a", 1.0, 50, 5), "g")),
            "warm": asyncio.create_task(
                actor.enqueue(Ticket("warm", 1, "b", 1.0, 50, 5, page_hashes=(1, 2, 3)), "g")
            ),
        }
        await asyncio.sleep(0)
        hear(actor, 0, max_num_seqs=1, page_hashes_added=(1, 2, 3), outstanding={"b": 100.0})
        actor._pump()
        await asyncio.wait(asked.values(), return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert [name for name, task in asked.items() if task.done()] == [first]
        for task in asked.values():
            task.cancel()
