"""Step sizes chosen from measured step times, on the real scheduler in virtual time; the calibration at start."""

from __future__ import annotations

import numpy as np
import pytest

from engine_actor.calibration import calibrate
from engine_actor.executor import Runner
from engine_actor.report import engine_report, with_events_of
from engine_actor.request import EngineRequest, SamplingParams, StreamRow
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepRecord, StepResult
from engine_actor.step_control import StepControl, step_features
from engine_actor.stub_runner import StubRunner
from policies.latency_model import StepEstimate, StepFeatures

SPEED = StepEstimate(2e-3, 2e-4, 5e-4, 2e-7, 0.0, 0.0)


class VirtualEngine:
    """Scheduler and step control on a clock that moves by what each step costs."""

    def __init__(self, *, num_pages: int = 2048, **limits: int) -> None:
        config = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 8192, **limits}
        self.scheduler = Scheduler(
            SchedulerConfig(prefill_chunk_size=config["max_num_batched_tokens"], **config), num_pages
        )
        self.control = StepControl(self.scheduler)
        self.now = 0.0
        self.rng = np.random.default_rng(0)
        self.steps: list[tuple[StepRecord, float]] = []
        self.rows: list[StreamRow] = []

    def submit(self, name: str, prompt: int, output: int, **targets: float) -> None:
        request = EngineRequest(
            request=name,
            attempt=1,
            ticket=name,
            tenant="a",
            prompt_token_ids=[len(name)] * prompt,
            sampling=SamplingParams(max_tokens=output),
            namespace=name,
            **targets,
        )
        self.scheduler.submit(request, self.now)

    def step(self) -> bool:
        record = self.scheduler.schedule(self.now, self.control.token_budget(self.now))
        self.scheduler.take_finished()
        if record is None:
            return False
        seconds = SPEED.seconds(step_features(record)) * float(self.rng.lognormal(0.0, 0.03))
        self.now += seconds
        sampled = int(record.is_last_chunk.sum())
        result = StepResult(record.step, np.ones(sampled, np.int32), np.ones(sampled, np.bool_), seconds)
        rows = self.scheduler.commit(record, result, self.now)
        self.control.observe(record, rows, seconds)
        self.steps.append((record, seconds))
        self.rows += rows
        return True

    def run(self) -> None:
        while self.step():
            pass


def warm(engine: VirtualEngine) -> None:
    """Let the model see prompts and decodes of several sizes."""
    for index in range(12):
        engine.submit(f"warm{index}", 40 + 30 * index, 10 + index)
    engine.run()
    engine.steps.clear()


def test_features_of_a_record(make_record, make_row) -> None:
    record = make_record(
        make_row([1] * 10, [1, 2], start=16, more=True),
        make_row([1], [3, 4], start=20),
        make_row([1], [5], start=0),
    )
    assert step_features(record) == StepFeatures(10, 2, 22, 10 * (16 + 5.0))


def test_a_long_prompt_does_not_break_the_gap_target_of_a_stream() -> None:
    """itl 30 ms: with whole steps of 256 tokens the gap would be 54 ms."""
    gaps = {}
    for itl in (None, 30.0):
        engine = VirtualEngine()
        warm(engine)
        engine.submit("stream", 16, 150, **({} if itl is None else {"itl_ms": itl}))
        while not any(row.request == "stream" for row in engine.rows):
            engine.step()
        begin = len(engine.steps)
        engine.submit("long", 3000, 1)
        engine.run()
        during = [s for r, s in engine.steps[begin:] if len(r.length) and r.length.max() > 1]
        gaps[itl] = float(np.quantile(during, 0.95))
    assert gaps[None] > 0.05
    assert gaps[30.0] <= 0.031


def test_without_targets_the_configured_bounds_stand() -> None:
    engine = VirtualEngine(max_num_batched_tokens=128)
    warm(engine)
    engine.submit("a", 1000, 4)
    engine.step()
    assert engine.control.token_budget(engine.now) is None
    assert engine.steps[-1][0].num_tokens == 128
    assert engine.control.batch_limit() == 32


def test_prefill_keeps_its_floor_when_the_target_cannot_be_met() -> None:
    """A target of 1 ms is out of reach: prompts still move by 16 tokens a step, and every stream decodes."""
    engine = VirtualEngine()
    warm(engine)
    for index in range(4):
        engine.submit(f"s{index}", 16, 60, tpot_ms=1.0)
    while len({row.request for row in engine.rows if row.request.startswith("s")}) < 4:
        engine.step()
    engine.submit("late", 160, 1)
    engine.step()
    record = engine.steps[-1][0]
    assert sorted(record.length.tolist()) == [1, 1, 1, 1, 16]


def test_a_mean_target_is_met_on_average_while_prompts_come() -> None:
    engine = VirtualEngine()
    warm(engine)
    engine.submit("stream", 16, 200, tpot_ms=20.0)
    while not any(row.request == "stream" for row in engine.rows):
        engine.step()
    begin = engine.now
    for index in range(30):
        engine.submit(f"prompt{index}", 500, 1)
    while not any(row.request == "stream" and row.finish_reason for row in engine.rows):
        engine.step()
    assert (engine.now - begin) / 199 <= 0.021
    assert sum(row.request.startswith("prompt") for row in engine.rows) > 10, "prefill went on meanwhile"


def test_the_batch_follows_the_gap_target() -> None:
    engine = VirtualEngine()
    warm(engine)
    engine.submit("a", 100, 50, itl_ms=15.0)
    engine.step()
    limit = engine.control.batch_limit()
    # 2 ms + 16 * 0.2 ms for the prefill floor + 0.52 ms a row, with a margin of some tenths
    assert 9 <= limit <= 18
    assert engine_report("e", engine.scheduler, engine.control).max_num_seqs == limit


def test_the_batch_follows_memory() -> None:
    engine = VirtualEngine(num_pages=101)
    for index in range(40):
        engine.submit(f"r{index}", 200, 8)
    engine.run()
    assert engine.control.batch_limit() == 7  # 204 tokens at half its life and half a page each, of 1,600


def test_long_outputs_are_counted_at_what_they_hold_on_average() -> None:
    engine = VirtualEngine(num_pages=101)
    for index in range(40):
        engine.submit(f"r{index}", 8, 200)
    engine.run()
    # From 8 to 208 tokens: 108 on average, 58 of deviation, half a page each.
    assert engine.control.batch_limit() == 12


def test_reports_carry_events_once_and_what_comes_later_keeps_those_before() -> None:
    engine = VirtualEngine()
    engine.submit("a", 10, 1)
    engine.submit("b", 10, 2)
    assert engine.step()
    first = engine_report("e", engine.scheduler, engine.control)
    assert (first.first_tokens, first.completed) == ((("a", 1), ("b", 1)), (("a", 1),))
    assert first.step_estimate is not None and first.peak_kv_tokens >= 12
    engine.run()
    second = engine_report("e", engine.scheduler, engine.control)
    assert (second.first_tokens, second.completed) == ((), (("b", 1),))
    both = with_events_of(first, second)
    assert (both.step, both.completed) == (second.step, (("a", 1), ("b", 1)))


class TimedRunner(StubRunner):
    """The stub on a virtual clock, with room for `num_pages` and a check of every page it is given."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.clock = 0.0
        self.records: list[StepRecord] = []

    def run(self, record: StepRecord) -> StepResult:
        self.records.append(record)
        self.clock += SPEED.seconds(step_features(record))
        return StepResult(0, np.zeros(record.num_rows, np.int32), np.ones(record.num_rows, np.bool_), 0.0)


@pytest.mark.parametrize("num_pages", [2, 5, 2048])
@pytest.mark.parametrize("limits", [(1, 16, 16), (32, 128, 8192), (64, 32, 100)])
def test_calibration_stays_within_the_engine_and_its_time(
    num_pages: int, limits: tuple[int, int, int]
) -> None:
    seqs, tokens, length = limits
    config = SchedulerConfig(seqs, tokens, length, prefill_chunk_size=tokens)
    runner = TimedRunner(num_pages)
    model = calibrate(runner, config, seconds=0.2, clock=lambda: runner.clock)
    assert model.observations >= 2
    longest = max(SPEED.seconds(step_features(record)) for record in runner.records)
    assert runner.clock <= 0.2 + 4 * longest
    for record in runner.records:
        assert record.page_indices.min() >= 1 and record.page_indices.max() < num_pages
        assert record.num_rows <= seqs and record.num_tokens <= tokens
        assert (record.start + record.length).max() <= min(length, (num_pages - 1) * 16)
        ends = record.start + record.length
        assert (np.diff(record.page_indptr) == -(-ends // 16)).all()
    if num_pages == 2048 and seqs == 32:
        estimate = model.estimate()
        assert estimate is not None
        for step in (StepFeatures(128), StepFeatures(0, 32, 32 * 300), StepFeatures(64, 8, 8 * 100)):
            assert estimate.seconds(step) == pytest.approx(SPEED.seconds(step), rel=0.1)


def test_calibration_runs_on_a_real_runner() -> None:
    runner: Runner = StubRunner(64, step_seconds=0.001)
    model = calibrate(runner, SchedulerConfig(8, 64, 512, prefill_chunk_size=64), seconds=0.0)
    assert model.observations == 2 and model.estimate() is not None
