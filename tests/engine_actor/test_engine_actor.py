"""The engine actor without Ray around it: streams, leases, epochs, reports."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
from gateway_end import answers, gateway_end

from engine_actor import actor as actor_module
from engine_actor import gateways as gateways_module
from engine_actor.actor import EngineActor, EngineNotReadyError, EngineSpec, StaleEpochError
from engine_actor.build import EngineOptions
from engine_actor.channel_messages import (
    Abort,
    Renew,
    StepMessage,
    Submit,
    SubmitAnswer,
    pack_answer,
    pack_request,
    unpack_answer,
    unpack_request,
)
from engine_actor.executor import PAGE_SIZE
from engine_actor.message_socket import MessageConnection, connect, pack
from engine_actor.report import pack_report, unpack_report
from engine_actor.request import (
    EngineRequest,
    RequestTimings,
    RequestUsage,
    SamplingParams,
    StreamRow,
    TokenLogprob,
)
from engine_actor.step import StepRecord, StepResult
from engine_actor.stub_runner import STUB_TEXT, StubRunner
from policies.latency_model import StepEstimate
from policies.page_hashes import page_hashes
from policies.tickets import EngineReport


def request(name: str, max_tokens: int = 5, **changes: object) -> EngineRequest:
    base = EngineRequest(
        request=name,
        attempt=1,
        ticket=name,
        tenant="a",
        prompt_token_ids=list(range(20)),
        sampling=SamplingParams(max_tokens),
        queue_epoch=1,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineActor]:
    monkeypatch.setattr(actor_module, "_host", lambda: "127.0.0.1")
    engine = EngineActor(EngineSpec("engine", "model", EngineOptions(source="", engine="stub", kv_pages=64)))
    while (await engine.renew("owner")).state != "ready":
        await asyncio.sleep(0.01)
    yield engine
    assert engine._engine_loop is not None
    engine._engine_loop.stop()


async def idle(engine: EngineActor) -> None:
    while not await engine.is_idle():
        await asyncio.sleep(0.005)


async def test_tokens_come_in_order_and_end_with_usage(engine: EngineActor) -> None:
    async with gateway_end(engine) as gateway:
        assert await gateway.submit(request("r")) is None
        rows = await gateway.rows_until()
    tokens = bytes(token for row in rows for token in row.token_ids)
    assert tokens == bytes(STUB_TEXT[position % len(STUB_TEXT)] for position in range(20, 25))
    assert rows[-1].finish_reason == "length"
    assert rows[-1].usage is not None and rows[-1].usage.output == 5
    assert rows[-1].timings is not None and rows[-1].timings.prefill_chunks[0][1] == 20
    assert await engine.is_idle()


async def test_each_gateway_gets_its_own_rows(engine: EngineActor) -> None:
    async with gateway_end(engine, "g1") as one, gateway_end(engine, "g2") as two:
        await one.submit(request("one"))
        await two.submit(request("two"))
        first, second = await asyncio.gather(one.rows_until(), two.rows_until())
    assert {row.request for row in first} == {"one"}
    assert {row.request for row in second} == {"two"}


async def test_submitting_twice_gives_one_answer(engine: EngineActor) -> None:
    async with gateway_end(engine) as gateway:
        assert [await gateway.submit(request("r")) for _ in range(2)] == [None, None]
        rows = await gateway.rows_until()
    assert sum(len(row.token_ids) for row in rows) == 5


async def test_abort_ends_with_a_last_row(engine: EngineActor) -> None:
    async with gateway_end(engine) as gateway:
        await gateway.submit(request("r", 10_000))
        gateway.send(Abort([("r", 1), ("nobody's", 1)]))
        rows = await gateway.rows_until()
    assert rows[-1].finish_reason == "abort" and rows[-1].usage is not None


async def test_a_request_without_lease_is_aborted(
    engine: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways_module, "LEASE_SECONDS", 1.0)
    async with gateway_end(engine) as gateway:
        await gateway.submit(request("kept", 10_000), request("left", 10_000))

        async def renew() -> None:
            while True:
                gateway.send(Renew([("kept", 1)]))
                await asyncio.sleep(0.2)

        renewal = asyncio.create_task(renew())
        rows = await gateway.rows_until()
        renewal.cancel()
    assert [(row.request, row.finish_reason) for row in rows if row.finish_reason] == [("left", "abort")]


async def test_B05_a_silent_gateway_is_cut_off_and_its_requests_end(
    engine: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways_module, "LEASE_SECONDS", 1.0)
    async with gateway_end(engine) as gateway:
        await gateway.submit(request("r", 100_000))
        await asyncio.wait_for(gateway.lost.wait(), 10.0)
        await asyncio.wait_for(idle(engine), 5.0)


async def test_B05_what_a_lost_gateway_asked_for_ends_at_once(engine: EngineActor) -> None:
    async with gateway_end(engine, "stays") as stays:
        async with gateway_end(engine, "goes") as goes:
            await goes.submit(request("one", 100_000), request("two", 100_000))
            await stays.submit(request("three", 300))
            await goes.rows.get()
        rows = await stays.rows_until()
        assert sum(len(row.token_ids) for row in rows) == 300
    await asyncio.wait_for(idle(engine), 5.0)


async def test_F10_what_no_gateway_says_ends_its_connection_and_nothing_else(engine: EngineActor) -> None:
    async with gateway_end(engine, "stays") as stays:
        for junk in (b"", b"\xc1", pack(("submit", 1, [(1, 2)])), pack(("other", ())), pack(7)):
            async with gateway_end(engine, "goes") as goes:
                goes.connection.send(junk)
                await asyncio.wait_for(goes.lost.wait(), 5.0)
        await stays.submit(request("r"))
        assert len(await stays.rows_until()) > 0


async def test_a_second_owner_must_wait_for_the_first_ones_lease(
    engine: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (await engine.renew("other")).owned
    monkeypatch.setattr(actor_module, "OWNER_LEASE_SECONDS", 0.0)
    await asyncio.sleep(0.01)
    assert (await engine.renew("other")).owned
    monkeypatch.undo()
    assert not (await engine.renew("owner")).owned


async def test_an_older_fair_queue_is_refused(engine: EngineActor) -> None:
    first = engine.reports(5)
    assert (await anext(first)).engine == "engine"
    assert await engine.queue_epoch() == 5
    with pytest.raises(StaleEpochError):
        await anext(engine.reports(5))
    async with gateway_end(engine) as gateway:
        old, new = request("old", queue_epoch=4), request("new", queue_epoch=5)
        assert "older" in (await gateway.submit(old) or "") and "older" in (
            await gateway.submit(new, old) or ""
        )
        assert await engine.is_idle(), "all or none"
        assert await gateway.submit(new) is None
        assert {row.request for row in await gateway.rows_until()} == {"new"}


async def test_reports_carry_cumulative_service_and_acceptances(engine: EngineActor) -> None:
    reports = engine.reports(1)
    seen: list[EngineReport] = [await anext(reports)]
    engine.submit([request("r", queue_epoch=1)])
    accepted: list[tuple[str, int]] = []
    while seen[-1].served.get("a", 0.0) < 20 + 2 * 5:
        seen.append(await asyncio.wait_for(anext(reports), 5.0))
        accepted += seen[-1].accepted
    assert accepted == [("r", 1)]
    totals = [report.served.get("a", 0.0) for report in seen]
    assert totals == sorted(totals)
    assert seen[-1].outstanding.get("a", 0.0) == 0.0


async def test_a_connection_is_told_all_service_first_and_then_what_changes(engine: EngineActor) -> None:
    await answers(engine, *(request(tenant, tenant=tenant, namespace=tenant) for tenant in ("a", "b")))
    reports, total = engine.reports(1), 20 + 2 * 5
    first = (await anext(reports)).served
    while first != {"a": total, "b": total}:  # the last step may still be on its way
        first |= (await asyncio.wait_for(anext(reports), 5.0)).served
    engine.submit([request("again", tenant="b", namespace="other")])
    told: dict[str, float] = {}
    while told.get("b") != 2 * total:
        told |= (await asyncio.wait_for(anext(reports), 5.0)).served
    assert told == {"b": 2 * total}
    assert (await anext(engine.reports(2))).served == {"a": total, "b": 2 * total}


async def test_steps_that_only_add_tokens_are_told_together(
    engine: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "REPORT_SECONDS", 3600.0)
    reports = engine.reports(1)
    await anext(reports)
    engine.submit([request("r", max_tokens=30)])
    told: list[EngineReport] = []
    while not (told and told[-1].completed):
        told.append(await asyncio.wait_for(anext(reports), 5.0))
    assert len(told) <= 6, "30 steps, of which few begin or end anything"
    assert [event for report in told for event in report.accepted] == [("r", 1)]
    assert [event for report in told for event in report.first_tokens] == [("r", 1)]
    assert told[-1].served == {"a": 20 + 2 * 30} and told[-1].running == 0


async def test_a_long_answer_is_reported_as_it_goes_on(
    engine: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "REPORT_SECONDS", 0.0)
    reports = engine.reports(1)
    await anext(reports)
    engine.submit([request("r", max_tokens=30)])
    served: set[float] = set()
    while max(served, default=0.0) < 20 + 2 * 30:
        served.add((await asyncio.wait_for(anext(reports), 5.0)).served.get("a", 0.0))
    assert len(served) > 10


async def test_the_step_in_flight_is_the_engines_own_time(engine: EngineActor) -> None:
    """A request is accepted when it is handed over, not when the loop next looks."""
    assert engine._engine_loop is not None
    scheduler, accepted = engine._engine_loop._scheduler, threading.Event()
    moments: list[float] = []
    submit = scheduler.submit

    def note(request: EngineRequest, now: float) -> bool:
        moments.append(now)
        accepted.set()
        return submit(request, now)

    scheduler.submit = note  # type: ignore[method-assign]
    blocked = threading.Event()

    def hold_up() -> None:
        blocked.wait(5.0)

    engine._engine_loop._inbox.put(hold_up)
    engine._engine_loop.submit(request("r"))
    handed_over = time.monotonic()
    blocked.set()
    assert await asyncio.to_thread(accepted.wait, 5.0)
    assert moments[0] <= handed_over


def test_messages_survive_packing() -> None:
    usage, timings = RequestUsage(3, 0, 1), RequestTimings(0.1, 0.2, None, ((0.3, 20),), 1)
    logprobs = (TokenLogprob(7, -0.5, ((7, -0.5),)),)
    message = StepMessage(
        "engine",
        1,
        2,
        3,
        (
            StreamRow("r/0", 1, (5,)),
            StreamRow("s/0", 2, (6, 7), None, None, usage),
            StreamRow("t/0", 1, (), "error", "no", usage, timings),
            StreamRow("u/0", 1, (7,), None, None, None, None, logprobs, logprobs),
        ),
    )
    copy = unpack_answer(pack_answer(message))
    assert copy == message and isinstance(copy, StepMessage)
    assert all(type(row) is StreamRow for row in copy.rows)
    for answer in (SubmitAnswer(3, None), SubmitAnswer(4, "no")):
        assert unpack_answer(pack_answer(answer)) == answer
    sampling = SamplingParams(5, 0.5, 3, 0.9, 7, (1, 2), logit_bias=((3, -1.5),), logprobs=0)
    asked = request("r", sampling=sampling, namespace="n", tpot_ms=5.0, kv_share=0.5)
    for asking in (
        Submit(3, [asked, request("s")]),
        Abort([("r", 1)]),
        Renew([("r", 1), ("s", 2)]),
        Renew([]),
    ):
        assert unpack_request(pack_request(asking)) == asking


def test_a_report_survives_packing() -> None:
    report = EngineReport(
        engine="e",
        engine_epoch=1,
        step=2,
        served={"a": 1.5},
        outstanding={"a": 0.0},
        running=1,
        waiting=0,
        waiting_prefill_tokens=0,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        free_pages=5,
        total_pages=6,
        page_size=16,
        accepted=(("r", 1),),
        step_estimate=StepEstimate(0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        decode_context=np.int64(7),  # type: ignore[arg-type]
        remaining=((1, 2), (3, 4)),
        page_hashes_added=(2**64 - 1, 0),
    )
    assert unpack_report(pack_report(report)) == report
    bare = dataclasses.replace(report, step_estimate=None)
    assert unpack_report(pack_report(bare)) == bare


async def test_reports_are_read_from_a_socket_and_a_newer_queue_ends_the_older_ones(
    engine: EngineActor,
) -> None:
    heard: asyncio.Queue[EngineReport] = asyncio.Queue()
    lost = [asyncio.Event() for _ in range(3)]

    async def read(epoch: int) -> MessageConnection:
        address = await engine.open_reports(epoch)
        return await connect(address, lambda data: heard.put_nowait(unpack_report(data)), lost[epoch - 1].set)

    first = await read(1)
    assert (await asyncio.wait_for(heard.get(), 5.0)).running == 0 and await engine.queue_epoch() == 1
    with pytest.raises(StaleEpochError):
        await engine.open_reports(1)
    engine.submit([request("r")])
    accepted: list[tuple[str, int]] = []
    while not accepted:
        accepted += (await asyncio.wait_for(heard.get(), 5.0)).accepted
    assert accepted == [("r", 1)] and not first.closed
    second = await read(3)
    await asyncio.wait_for(lost[0].wait(), 5.0)
    assert not second.closed
    second.close()
    while engine._report_queue is not None:  # nobody reads: nothing is kept for it
        await asyncio.sleep(0.005)


async def test_a_new_fair_queue_takes_the_reports_over(engine: EngineActor) -> None:
    old, new = engine.reports(1), engine.reports(2)
    await anext(old)
    await anext(new)
    assert (await asyncio.wait_for(anext(new), 5.0)).engine == "engine"
    with pytest.raises(StopAsyncIteration):
        while True:
            await asyncio.wait_for(anext(old), 5.0)


async def test_a_new_fair_queue_hears_of_every_cached_page(engine: EngineActor) -> None:
    prompt = list(range(70))
    await answers(engine, request("r", namespace="n", prompt_token_ids=prompt))
    first = await anext(engine.reports(1))
    assert set(page_hashes("n", prompt, 16)) <= set(first.page_hashes_added)
    assert set((await anext(engine.reports(2))).page_hashes_added) == set(first.page_hashes_added)


async def test_drain_is_reported_at_once(engine: EngineActor) -> None:
    reports = engine.reports(1)
    await anext(reports)
    await engine.drain()
    while not (await asyncio.wait_for(anext(reports), 2.0)).draining:
        pass


async def test_a_model_that_cannot_be_loaded_is_told_to_the_owner() -> None:
    engine = EngineActor(
        EngineSpec("engine", "model", EngineOptions(source="/nowhere/model.gguf", engine="torch"))
    )
    while (heartbeat := await engine.renew("owner")).state == "loading":
        await asyncio.sleep(0.01)
    assert heartbeat.state == "failed" and "model.gguf" in heartbeat.detail
    with pytest.raises(EngineNotReadyError):
        await engine.describe()


class HeldRunner(StubRunner):
    """A step that begins while `go` is not set does not come back before it is."""

    def __init__(self) -> None:
        super().__init__(65)
        self.go, self.entered = threading.Event(), threading.Event()

    def run(self, record: StepRecord) -> StepResult:
        self.entered.set()
        assert self.go.wait(60)
        return super().run(record)


async def test_c03_an_engine_that_waits_without_progress_turns_red_and_says_why(
    engine: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.heartbeat("owner").state == "ready"
    loop, held = engine._engine_loop, HeldRunner()
    assert loop is not None
    loop._runner = held
    monkeypatch.setattr(actor_module, "STALL_SECONDS", 0.0)
    answer = asyncio.create_task(answers(engine, request("r")))
    assert await asyncio.to_thread(held.entered.wait, 60)
    heartbeat = engine.heartbeat("owner")
    assert heartbeat.state == "stalled"
    assert "does not come back from the model; 1 requests run, 0 wait" in heartbeat.detail
    monkeypatch.setattr(actor_module, "STALL_SECONDS", 30.0)
    held.go.set()
    await answer
    assert engine.heartbeat("owner").state == "ready"


async def test_c03_computing_the_same_again_and_again_is_no_progress(engine: EngineActor) -> None:
    loop, scheduler = engine._engine_loop, engine._scheduler
    assert loop is not None and scheduler is not None
    loop.stop()
    scheduler.submit(request("r", max_tokens=50, prompt_token_ids=list(range(200))), 0.0)
    scheduler._prefill._chunk_size = 100
    for _ in range(4):
        loop._turn()
    assert scheduler.running[0].output_tokens == 3

    def lose_everything_and_compute_half() -> float:
        scheduler._preempt(scheduler.running[0])
        scheduler.cache.clear()
        loop._turn()
        return loop.last_progress

    first = lose_everything_and_compute_half()
    again = lose_everything_and_compute_half()
    assert again > first, "once or twice it is what preemption costs"
    pool = scheduler.cache.total * PAGE_SIZE
    for _ in range(pool // 100 + 1):
        last = lose_everything_and_compute_half()
    assert lose_everything_and_compute_half() == last
    assert "compute again" in loop.why_stalled()
    for _ in range(2):
        loop._turn()
    assert loop.last_progress > last, "a new token"


async def test_c03_waiting_with_nothing_running_is_no_progress(engine: EngineActor) -> None:
    loop, scheduler = engine._engine_loop, engine._scheduler
    assert loop is not None and scheduler is not None
    loop.stop()
    scheduler.submit(request("r"), 0.0)
    before = loop.last_progress
    scheduler._admission.fits = lambda *_: False  # type: ignore[method-assign]
    loop._turn()
    assert loop.last_progress == before
    assert loop.why_stalled().startswith("no waiting request can be started; 0 requests run, 1 wait")
