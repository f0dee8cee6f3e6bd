"""Scheduling a step while the one before runs: the same answers, accounts and cached pages as one step at a time."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from gateway_end import answers
from hypothesis import settings
from scheduler_harness import (
    PROMPTS,
    DelayedRunner,
    PageReadingRunner,
    Pipeline,
    check_accounts,
    drain,
    expected,
    make,
    request,
)
from test_scheduler import SchedulerMachine

from engine_actor import actor as actor_module
from engine_actor.actor import EngineActor, EngineSpec
from engine_actor.build import EngineOptions
from engine_actor.executor import PAGE_SIZE, Runner
from engine_actor.loop import EngineLoop, StepOutcome
from engine_actor.request import StreamRow
from engine_actor.scheduler import Scheduler
from engine_actor.step import StepRecord, StepResult
from engine_actor.step_control import StepControl
from engine_actor.stub_runner import STUB_TEXT


def make_pipeline(num_pages: int = 200, **limits: object) -> tuple[Scheduler, Pipeline]:
    scheduler, runner = make(num_pages, **limits)
    return scheduler, Pipeline(scheduler, DelayedRunner(runner), depth=2)


def run_all(scheduler: Scheduler, pipeline: Pipeline) -> dict[str, list[StreamRow]]:
    rows: dict[str, list[StreamRow]] = {}
    while scheduler.has_work:
        for row in pipeline.turn()[2]:
            rows.setdefault(row.request, []).append(row)
        check_accounts(scheduler)
    scheduler.cache.check_idle()
    return rows


def tokens(rows: list[StreamRow]) -> list[int]:
    return [token for row in rows for token in row.token_ids]


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 32])
def test_answers_are_those_of_one_step_at_a_time(chunk: int) -> None:
    scheduler, pipeline = make_pipeline(prefill_chunk_size=chunk)
    for name, prompt in PROMPTS.items():
        scheduler.submit(request(name, prompt), 0.0)
    rows = run_all(scheduler, pipeline)
    assert {name: tokens(own) for name, own in rows.items()} == {
        name: expected(prompt, 8) for name, prompt in PROMPTS.items()
    }
    assert scheduler.step - pipeline.overlapped <= 2, (
        "every step but the first began before the last had ended"
    )


def test_answers_do_not_depend_on_preemption() -> None:
    scheduler, pipeline = make_pipeline(num_pages=16)
    for name, prompt in PROMPTS.items():
        scheduler.submit(request(name, prompt, 60, predicted=1), 0.0)
    rows = run_all(scheduler, pipeline)
    assert {name: tokens(own) for name, own in rows.items()} == {
        name: expected(prompt, 60) for name, prompt in PROMPTS.items()
    }
    assert scheduler.preemptions > 0
    assert pipeline.overlapped > scheduler.step / 2


@pytest.mark.parametrize("length", range(PAGE_SIZE))
def test_a_row_beyond_the_end_leaves_no_trace(length: int) -> None:
    """A stop token comes in step N, when N + 1 is under way: rows, usage, service and cached pages stay the same."""
    prompt = [9] * (20 + length)
    answer = expected(prompt, 40)
    stop_at = next(i for i in range(3, 40) if answer[i] not in answer[:i])
    seen = []
    for depth in (1, 2):
        scheduler, runner = make()
        scheduler.submit(request("stops", prompt, 40, stop=answer[stop_at]), 0.0)
        scheduler.submit(request("other", [5] * 7, 20), 0.0)
        rows = run_all(scheduler, Pipeline(scheduler, DelayedRunner(runner), depth))
        assert tokens(rows["stops"]) == answer[: stop_at + 1]
        last = rows["stops"][-1]
        assert last.finish_reason == "stop" and last.usage is not None and last.usage.output == stop_at + 1
        seen.append((last.usage, tokens(rows["other"]), scheduler.served, scheduler.cache.evictable))
        assert scheduler.service.output_tokens == stop_at + 1 + 20
    assert seen[0] == seen[1]


def test_pages_of_an_ended_request_wait_for_the_step_in_flight() -> None:
    scheduler, pipeline = make_pipeline()
    prompt = [9] * 20
    scheduler.submit(request("stops", prompt, 40, stop=expected(prompt, 40)[0]), 0.0)
    pipeline.turn()
    assert pipeline.turn()[2][0].finish_reason == "stop"
    assert (scheduler.num_running, pipeline.in_flight) == (0, 1)
    assert scheduler.has_work and scheduler.cache.total - scheduler.cache.free == 2
    assert pipeline.turn()[2] == []
    assert not scheduler.has_work and scheduler.cache.total - scheduler.cache.free == 1, "one page is cached"
    scheduler.cache.check_idle()


def test_no_step_is_wasted_on_a_request_that_reaches_its_length() -> None:
    scheduler, pipeline = make_pipeline()
    scheduler.submit(request("r", [3] * 10, 5), 0.0)
    run_all(scheduler, pipeline)
    assert scheduler.step == 5


def test_a_request_without_output_and_one_that_outgrows_the_pool() -> None:
    scheduler, pipeline = make_pipeline(num_pages=5, max_model_len=4096)
    scheduler.submit(request("none", [1] * 40, 0), 0.0)
    scheduler.submit(request("grows", [1] * 30, 1000), 0.0)
    rows = run_all(scheduler, pipeline)
    assert [row.finish_reason for row in rows["none"]] == ["length"] and tokens(rows["none"]) == []
    assert tokens(rows["grows"]) == expected([1] * 30, 4 * PAGE_SIZE - 30)


def test_abort_in_every_phase_frees_everything() -> None:
    for turns_before in range(12):
        scheduler, pipeline = make_pipeline()
        scheduler.submit(request("r", [3] * 100, 50), 0.0)
        rows = [row for _ in range(turns_before) for row in pipeline.turn()[2]]
        scheduler.abort("r", 1)
        rows += run_all(scheduler, pipeline)["r"]
        assert rows[-1].finish_reason == "abort" and rows[-1].usage is not None
        got = tokens(rows)
        assert got == expected([3] * 100, len(got)) and rows[-1].usage.output == len(got)
        assert rows[-1].usage.computed_input == min(100, 32 * turns_before)


def test_an_abort_waits_for_the_step_in_flight() -> None:
    scheduler, pipeline = make_pipeline()
    for name in ("r", "other"):
        scheduler.submit(request(name, [3] * 15, 50, tenant=name), 0.0)
    pipeline.turn()
    scheduler.abort("r", 1)
    assert scheduler.schedule(0.0) is None, "though the other one could go on"
    assert [row.request for row in pipeline.commit()[2]] == ["other"]
    assert run_all(scheduler, pipeline)["r"][0].finish_reason == "abort"


def test_non_finite_logits_end_only_that_request() -> None:
    class Broken(PageReadingRunner):
        def run(self, record):  # type: ignore[no-untyped-def]
            result = super().run(record)
            finite = record.request[record.is_last_chunk] != 0
            return StepResult(record.step, np.where(finite, result.token_ids, 0), finite, 0.0)

    scheduler, _ = make()
    scheduler.submit(request("bad", [1, 2]), 0.0)
    scheduler.submit(request("good", [3, 4]), 0.0)
    rows = run_all(scheduler, Pipeline(scheduler, DelayedRunner(Broken(200)), depth=2))
    assert [row.finish_reason for row in rows["bad"]] == ["error"] and scheduler.nonfinite_requests == 1
    assert tokens(rows["good"]) == expected([3, 4], 8)


def test_equal_prompts_that_arrive_together_compute_their_prefix_once() -> None:
    """Also while the first one's only chunk is in flight."""
    scheduler, pipeline = make_pipeline(max_num_batched_tokens=512, prefill_chunk_size=512)
    prefix = list(range(40)) * 3
    for i in range(8):
        scheduler.submit(request(f"r{i}", [*prefix, i], 4), 0.0)
    rows = run_all(scheduler, pipeline)
    whole_pages = len(prefix) // PAGE_SIZE * PAGE_SIZE
    assert scheduler.service.prefix["a"].hit_tokens == 7 * whole_pages
    assert all(tokens(rows[f"r{i}"]) == expected([*prefix, i], 4) for i in range(8))


def test_steps_are_committed_in_order_and_two_at_most_are_in_flight() -> None:
    scheduler, runner = make()
    scheduler.submit(request("r", [3] * 100, 50), 0.0)
    records = [scheduler.schedule(0.0) for _ in range(2)]
    assert records[0] is not None and records[1] is not None
    with pytest.raises(ValueError, match="two steps are in flight"):
        scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="not the oldest step in flight"):
        scheduler.commit(records[1], runner.run(records[1]), 0.0)
    for record in records:
        scheduler.commit(record, runner.run(record), 0.0)
    assert drain(scheduler, runner)["r"] == expected([3] * 100, 50)


class ThreadedRunner(DelayedRunner):
    """A device of its own: steps run in a thread, in order, while the engine's goes on."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner, lambda: False)
        self.device = ThreadPoolExecutor(1)
        self._pauses = random.Random(0)

    def start(self, record: StepRecord) -> Callable[[], StepResult]:
        return self.device.submit(self._on_device, record, self._pauses.random() * 2e-3).result

    def _on_device(self, record: StepRecord, pause: float) -> StepResult:
        time.sleep(pause)
        return super().start(record)()


def test_the_loop_beside_a_device_of_its_own() -> None:
    scheduler, reading = make(num_pages=24, async_scheduling=True)
    runner = ThreadedRunner(reading)
    outcomes: list[StepOutcome] = []
    failures: list[BaseException] = []
    ended, left = threading.Event(), set(PROMPTS)

    def on_outcome(outcome: StepOutcome) -> None:
        outcomes.append(outcome)
        left.difference_update(row.request for row in outcome.rows if row.finish_reason)
        if not left:
            ended.set()

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        ended.set()

    loop = EngineLoop(scheduler, runner, StepControl(scheduler), on_outcome, on_failure)
    started = time.monotonic()
    for name, prompt in PROMPTS.items():
        stop = expected(prompt, 60)[20] if name in ("r1", "r4") else None
        loop.submit(request(name, prompt, 60, stop=stop, predicted=1))
    loop.start()
    assert ended.wait(60) and not failures
    loop.stop()
    seconds = time.monotonic() - started
    runner.device.shutdown()
    rows = [row for outcome in outcomes for row in outcome.rows]
    for name, prompt in PROMPTS.items():
        stop = expected(prompt, 60)[20] if name in ("r1", "r4") else None
        assert tokens([row for row in rows if row.request == name]) == expected(prompt, 60, stop)
    steps = [outcome for outcome in outcomes if outcome.record is not None]
    assert scheduler.preemptions > 0
    assert [step.record.step for step in steps if step.record] == list(range(1, len(steps) + 1))
    assert sum(step.step_seconds for step in steps) <= seconds, "no time counts for two steps"


async def test_an_engine_of_the_stub_with_the_switch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "_host", lambda: "127.0.0.1")
    options = EngineOptions(source="", engine="stub", kv_pages=64, async_scheduling=True)
    engine = EngineActor(EngineSpec("engine", "model", options))
    while (await engine.renew("owner")).state != "ready":
        await asyncio.sleep(0.01)
    rows = await answers(engine, replace(request("r", list(range(20)), 40), queue_epoch=1))
    assert bytes(tokens(rows)) == bytes(STUB_TEXT[p % len(STUB_TEXT)] for p in range(20, 60))
    assert await engine.is_idle()
    snapshot = await engine.stats()
    assert snapshot.steps == 40 and snapshot.prefill_chunk_tokens.sum == 20
    assert snapshot.decode_batch_requests.count == 39
    assert engine._engine_loop is not None
    engine._engine_loop.stop()


class AsyncSchedulerMachine(SchedulerMachine):
    """The same with two steps in flight, each run at a moment drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        moments = random.Random(0)
        self.pipeline = Pipeline(
            self.scheduler, DelayedRunner(self.runner, lambda: moments.random() < 0.5), depth=2
        )


TestAsyncSchedulerMachine = AsyncSchedulerMachine.TestCase
TestAsyncSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
