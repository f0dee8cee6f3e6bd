"""What the fair queue's actor answers, called directly: protection lines, deadlines, asking twice, output lengths."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from engine_actor.message_socket import pack
from policies.fair_queue import TenantSnapshot
from policies.guardrails import ProtectionLines
from policies.latency_model import StepEstimate
from policies.output_length import DEFAULT_OUTPUT_LENGTH, OutputLength
from policies.tickets import EngineReport, Grant, Refusal, Ticket
from serve_app.fair_queue import FairQueueActor, FairQueueSpec
from serve_app.output_lengths import SharedOutputLengths
from serve_app.queue_messages import (
    QueueSnapshot,
    Tell,
    Withdraw,
    pack_question,
    pack_reply,
    unpack_question,
    unpack_reply,
)

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


class Asked:
    """A gateway that asks once."""

    def __init__(self, actor: FairQueueActor, ticket: Ticket) -> None:
        self.answers: list[Grant | Refusal] = []
        actor.ask(ticket, self)

    def answer(self, answer: Grant | Refusal) -> None:
        self.answers.append(answer)


def ask(actor: FairQueueActor, ticket: Ticket) -> Grant | Refusal | None:
    """The answer that comes at once."""
    answers = Asked(actor, ticket).answers
    return answers[0] if answers else None


def tell(actor: FairQueueActor, *lengths: tuple[str, int], **lines: float) -> QueueSnapshot:
    return actor.tell(Tell(ProtectionLines(**lines), lengths))


async def test_a_crossed_line_sheds_batch_work_and_nothing_else() -> None:
    actor = FairQueueActor(SPEC)
    hear(actor, 0)
    assert tell(actor, ttft_p95_ms=1e-6).protection_step == 0
    assert isinstance(ask(actor, ticket("early", service_class="batch")), Grant)
    for number in range(40):
        assert isinstance(ask(actor, ticket(f"r{number}")), Grant)
        hear(actor, number + 1, accepted=((f"r{number}", 1),), first_tokens=((f"r{number}", 1),))
    assert actor._rails.evaluate(time.monotonic()) == 1
    answer = ask(actor, ticket("late", service_class="batch"))
    assert isinstance(answer, Refusal) and answer.code == "overloaded" and "ttft_p95_ms" in answer.message
    assert isinstance(ask(actor, ticket("n")), Grant)
    assert tell(actor).protection_step == 1


async def test_a_deadline_is_refused_at_once_and_a_ticket_asked_for_twice_is_one() -> None:
    actor = FairQueueActor(SPEC)
    hear(actor, 0, running=8, live_sequences={"a": 8})  # every slot is its own
    first = Asked(actor, ticket("r"))
    assert not first.answers and tell(actor).queued == 1
    second = ask(actor, ticket("r", remaining_ttft_ms=0.0))
    assert isinstance(second, Refusal) and second.code == "deadline_unattainable"
    assert second.earliest_deadline_ms is not None
    assert not first.answers, "the last one who asked gets the answer"
    assert tell(actor).queued == 0


async def test_a_grant_goes_to_who_asked_last_and_a_withdrawn_ticket_gets_none() -> None:
    actor = FairQueueActor(SPEC)
    hear(actor, 0, running=8, live_sequences={"a": 8})
    before, again, gone = (Asked(actor, ticket(name)) for name in ("r", "r", "gone"))
    actor.withdraw("gone", 1)
    hear(actor, 1)
    actor._pump()
    assert [type(answer) for answer in again.answers] == [Grant] and not before.answers and not gone.answers
    assert not actor._asking


async def test_gateways_share_what_they_learn_of_output_lengths_and_a_successor_knows_it() -> None:
    actor = FairQueueActor(SPEC)
    here, there = SharedOutputLengths(), SharedOutputLengths()
    for _ in range(30):
        here.observe("a", 400)
    tell(actor, *here.take_untold())
    assert here.take_untold() == ()
    there.learn(tell(actor).output_lengths)
    assert there.of("a").bound(1000) == 400 and there.of("a").expected(1000) > 390
    assert there.of("a").expected(100) == 100 and there.of("b") == DEFAULT_OUTPUT_LENGTH

    successor = FairQueueActor(replace(SPEC, restored=await actor.export_state()))
    assert tell(successor).output_lengths == {"a": there.of("a")}


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
            "cold": Asked(actor, Ticket("cold", 1, "a", 1.0, 50, 5)),
            "warm": Asked(actor, Ticket("warm", 1, "b", 1.0, 50, 5, page_hashes=(1, 2, 3))),
        }
        hear(actor, 0, max_num_seqs=1, page_hashes_added=(1, 2, 3), outstanding={"b": 100.0})
        actor._pump()
        assert [name for name, one in asked.items() if one.answers] == [first]


def test_what_gateway_and_queue_say_survives_packing() -> None:
    asked = ticket("r", page_hashes=(1, 2**64 - 1), remaining_ttft_ms=1.5, service_class="batch")
    for question in (asked, Withdraw("r", 2), Tell(ProtectionLines(itl_p95_ms=3.0), (("a", 1), ("b", 2)))):
        assert unpack_question(pack_question(question)) == question
    snapshot = QueueSnapshot(
        3, ("e0", "e1"), 2, {"a": TenantSnapshot(1, 2.0, 3.0, 4.0, 5.0)}, 1, {"a": OutputLength(5.5, 9)}
    )
    for reply in (
        Grant("r", 1, 2, "e0", 3, 4.5, demoted=True),
        Refusal("r", 1, "queue_full", "no", 5.0),
        snapshot,
        QueueSnapshot(3, (), 0),
    ):
        assert unpack_reply(pack_reply(reply)) == reply
    for junk in (b"", b"\xc1", pack(7), pack(("other", 1)), pack(("ticket", 1))):
        with pytest.raises((ValueError, TypeError)):
            unpack_question(junk)
