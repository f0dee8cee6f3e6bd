"""Whatever happens around a request, its answer is the one it gets alone: random rounds over real executors.

Each round draws limits (pool, slots, chunk, budget), tenants, prompts with shared prefixes, wrong predictions and
cancellations, and runs the scheduler over a small random model. After every step NaN and infinities are written into
every page that is free. Torch in float32 may part from the answer alone where the two best logits are closer than
1e-4; the native executor may not part at all, sampled tokens included.

The same with two steps in flight: by the runner for asynchronous scheduling, which computes a step when it is begun,
and with steps that run at any moment until their result is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scheduler_harness import DelayedRunner, Pipeline, check_accounts

from engine_actor.async_runner import AsyncModelRunner
from engine_actor.executor import PAGE_SIZE, Executor, Runner
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.config import ModelConfig
from engine_actor.loading.source import ResolvedSource
from engine_actor.native.build import NativeUnavailable, load_library
from engine_actor.native.executor import NativeExecutor
from engine_actor.native.probe import RandomWeights
from engine_actor.request import EngineRequest, SamplingParams
from engine_actor.sampling.sampler import sample
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepRecord, StepResult
from engine_actor.torch_executor import TorchExecutor

MAX_PAGES = 41
MAX_OUTPUT = 24
TIE = 1e-4
SAMPLINGS = (
    SamplingParams(MAX_OUTPUT, temperature=0.0),
    SamplingParams(MAX_OUTPUT, temperature=0.9, top_k=20, top_p=0.9, seed=5),
)


class Subject(Runner):
    """An executor under test, its KV pool, and the answers it gives to single requests."""

    def __init__(self, executor: Executor, pages: list[torch.Tensor], exact: bool) -> None:
        """`pages` are views of the KV pool with the page number in front."""
        self.info, self.num_pages, self._executor = executor.info, executor.num_pages, executor
        self.runner: Runner = self
        self.depth = 1
        self._pages = pages
        self._exact = exact
        self._gaps: list[float] = []
        self._alone: dict[tuple[tuple[int, ...], int], tuple[list[int], list[float]]] = {}

    @property
    def samplings(self) -> tuple[SamplingParams, ...]:
        return SAMPLINGS if self._exact else SAMPLINGS[:1]

    def run(self, record: StepRecord) -> StepResult:
        with torch.inference_mode():
            logits = self._executor.execute(record)
            if len(logits):
                best = logits.topk(2).values
                self._gaps = (best[:, 0] - best[:, 1]).tolist()
            tokens, finite = sample(logits, record.sampling)
        return StepResult(record.step, tokens, finite, 0.0)

    def poison(self, free: list[int], value: float) -> None:
        index = torch.tensor(free)
        for pages in self._pages:
            pages[index] = value

    def alone(self, prompt: list[int], sampling: int) -> tuple[list[int], list[float]]:
        """Tokens and the gap at each, of a request that has the engine to itself, its prompt in one step."""
        key = (tuple(prompt), sampling)
        if key not in self._alone:
            scheduler = Scheduler(SchedulerConfig(1, 512, 512, 512), MAX_PAGES)
            scheduler.submit(EngineRequest("alone", 1, "alone", "t", prompt, SAMPLINGS[sampling]), 0.0)
            tokens: list[int] = []
            gaps: list[float] = []
            while (record := scheduler.schedule(0.0)) is not None:
                for row in scheduler.commit(record, self.run(record), 0.0):
                    tokens += row.token_ids
                    gaps += self._gaps
            self._alone[key] = tokens, gaps
        return self._alone[key]

    def check(self, prompt: list[int], sampling: int, answer: list[int]) -> None:
        tokens, gaps = self.alone(prompt, sampling)
        for position, token in enumerate(answer):
            if token != tokens[position]:
                assert not self._exact and gaps[position] < TIE, (prompt, sampling, answer, tokens, position)
                return


MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=83,
    max_position_embeddings=512,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
    weights_dtype="bfloat16",
)


def torch_subject() -> Subject:
    executor = TorchExecutor(checkpoint(), dtype="float32", num_pages=MAX_PAGES, threads=1)
    backend = executor._attention
    pools = (backend._keys, backend._values)  # type: ignore[attr-defined]
    pages = [pool.unflatten(2, (MAX_PAGES, PAGE_SIZE)).movedim(2, 0) for pool in pools]
    return Subject(executor, pages, exact=False)


def torch_subject_async() -> Subject:
    subject = torch_subject()
    assert isinstance(subject._executor, TorchExecutor)
    subject.runner, subject.depth = AsyncModelRunner(subject._executor), 2
    return subject


def native_subject_delayed() -> Subject:
    """Not a mode of the product: for what its exactness shows."""
    subject, moments = native_subject(), random.Random(0)
    subject.runner, subject.depth = DelayedRunner(subject, lambda: moments.random() < 0.7), 2
    return subject


def native_subject() -> Subject:
    try:
        load_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    executor = NativeExecutor(checkpoint(), num_pages=MAX_PAGES, threads=1)
    pools = [kept for kept in executor._model._kept if getattr(kept, "shape", ())[1:2] == (MAX_PAGES,)]
    assert len(pools) == 2
    return Subject(executor, [pool.movedim(1, 0) for pool in pools], exact=True)


def checkpoint() -> Checkpoint:
    return Checkpoint(MODEL, ResolvedSource("hf", Path()), RandomWeights(MODEL, 3))


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    make: Callable[[], Subject] = request.param
    torch.set_num_threads(1)
    return make()


def play_round(subject: Subject, seed: int) -> Scheduler:
    """One round; checks accounts after every step and every answer at the end."""
    rng = random.Random(seed)
    num_pages = rng.choice([7, 7, 8, 9, 12, MAX_PAGES])
    config = SchedulerConfig(
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([4, 20, 64, 512]),
        max_model_len=100,
        prefill_chunk_size=rng.choice([1, 2, 5, 15, 16, 17, 33, 100, 512]),
        kv_cache_utilization_limit=rng.choice([0.7, 1.0]),
        prefix_caching=rng.random() < 0.8,
        kv_watermark=rng.choice([0.0, 0.1]),
    )
    scheduler = Scheduler(config, num_pages)
    pipeline = Pipeline(scheduler, subject.runner, subject.depth)
    wanted: dict[str, tuple[list[int], int, int]] = {}
    answers: dict[str, list[int]] = {}
    reasons: dict[str, str | None] = {}
    to_come = rng.randint(3, 9)
    while to_come or scheduler.has_work:
        for _ in range(rng.choice([0, 0, 0, 0, 1, 4]) if to_come else 0):
            if not to_come:
                break
            to_come -= 1
            name = f"r{len(wanted)}"
            prompt = [token for page in range(rng.randint(0, 3)) for token in [page % 2 + 1] * PAGE_SIZE]
            prompt += [3 + rng.randint(0, 1)] * rng.choice([1, 7, 15, 16, 17])
            sampling = rng.randrange(len(subject.samplings))
            count = rng.choice([1, 5, MAX_OUTPUT, MAX_OUTPUT])
            wanted[name] = prompt, sampling, count
            params = SAMPLINGS[sampling]
            scheduler.submit(
                EngineRequest(
                    name,
                    1,
                    name,
                    tenant := rng.choice("abc"),
                    prompt,
                    SamplingParams(count, params.temperature, params.top_k, params.top_p, params.seed),
                    namespace=rng.choice([tenant, "public"]),
                    weight={"a": 1.0, "b": 3.0, "c": 0.5}[tenant],
                    predicted_output_tokens=rng.choice([1, 1, count, 60]),
                ),
                0.0,
            )
        if wanted and rng.random() < 0.05:
            scheduler.abort(rng.choice(list(wanted)), 1)
        rows = []
        if scheduler.running and rng.random() < 0.05:  # at moments of our choice, beside the scheduler's own
            while pipeline.in_flight:
                rows += pipeline.commit()[2]
            if scheduler.running:
                scheduler._preempt(rng.choice(scheduler.running))
        if rng.random() < 0.05:
            scheduler.cache.clear()
        _, result, new = pipeline.turn(rng.choice([None, None, 1, 7]))
        assert result is None or result.finite.all()
        for row in rows + new:
            answers.setdefault(row.request, []).extend(row.token_ids)
            reasons[row.request] = row.finish_reason
        check_accounts(scheduler)
        if free := scheduler.cache._pool._free:
            subject.poison(free, rng.choice([float("nan"), float("inf"), float("-inf")]))
    scheduler.cache.check_idle()
    scheduler.cache.clear()
    assert scheduler.cache.free == scheduler.cache.total
    for name, (prompt, sampling, count) in wanted.items():
        answer = answers.get(name, [])
        assert len(answer) == count or reasons[name] == "abort"
        subject.check(prompt, sampling, answer)
    return scheduler


@pytest.mark.parametrize(
    ("subject", "rounds"),
    [(torch_subject, 60), (torch_subject_async, 12), (native_subject, 250), (native_subject_delayed, 50)],
    indirect=["subject"],
)
def test_c08_c10_d06_d07_answers_are_those_of_each_request_alone(subject: Subject, rounds: int) -> None:
    preemptions = cached = recomputed = 0
    for seed in range(rounds):
        scheduler = play_round(subject, seed)
        preemptions += scheduler.preemptions
        cached += scheduler.service.cached_tokens
        recomputed += scheduler.service.recomputed_chunks
    assert min(preemptions, cached, recomputed) > rounds // 4, (
        "the rounds must be hard enough to show something"
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "subject", [torch_subject, torch_subject_async, native_subject, native_subject_delayed], indirect=True
)
def test_c08_c10_d06_d07_ten_thousand_rounds(subject: Subject) -> None:
    for seed in range(10_000, 20_000):
        play_round(subject, seed)


@pytest.mark.parametrize("subject", [torch_subject, native_subject], indirect=True)
def test_poison_in_a_page_that_is_read_would_be_seen(subject: Subject) -> None:
    """The check can fail: NaN in a page of a running request reaches its logits."""
    scheduler = Scheduler(SchedulerConfig(1, 512, 512, 512), MAX_PAGES)
    scheduler.submit(EngineRequest("r", 1, "r", "t", [5] * 40, SAMPLINGS[0]), 0.0)
    for poisoned in (False, True):
        record = scheduler.schedule(0.0)
        assert record is not None
        if poisoned:
            subject.poison(record.page_indices[:1].tolist(), float("nan"))
        result = subject.run(record)
        assert result.finite.all() == np.bool_(not poisoned)
        scheduler.commit(record, result, 0.0)
