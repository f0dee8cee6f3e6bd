"""Log probabilities on the real model: chunked or whole, alone or in company, made or scored, they are the same."""

from __future__ import annotations

import pytest
import torch

from engine_actor.executor import Executor
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.native.build import NativeUnavailable
from engine_actor.native.executor import NativeExecutor
from engine_actor.request import EngineRequest, SamplingParams, TokenLogprob
from engine_actor.runner import ModelRunner
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.torch_executor import TorchExecutor

LENGTHS = (90, 33, 4)


@pytest.fixture(params=["native", "torch"])
def executor(request: pytest.FixtureRequest, smollm: Checkpoint, float32_executor: TorchExecutor) -> Executor:
    if request.param == "torch":
        return float32_executor
    try:
        return NativeExecutor(smollm, num_pages=64, threads=1)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def scores(
    executor: Executor, prompts: list[list[int]], chunk: int, max_tokens: int
) -> list[list[TokenLogprob]]:
    """Entries of prompt and output of each request, all run together."""
    scheduler = Scheduler(SchedulerConfig(8, chunk, 512, chunk), 64)
    params = SamplingParams(max_tokens, temperature=0.0, logprobs=2, prompt_logprobs=2)
    for index, prompt in enumerate(prompts):
        scheduler.submit(EngineRequest(str(index), 1, str(index), "t", prompt, params), 0.0)
    runner = ModelRunner(executor)
    entries: list[list[TokenLogprob]] = [[] for _ in prompts]
    while scheduler.has_work:
        record = scheduler.schedule(0.0)
        assert record is not None
        for row in scheduler.commit(record, runner.run(record), 0.0):
            entries[int(row.request)] += row.prompt_logprobs + row.logprobs
    return entries


def assert_same(one: list[TokenLogprob], other: list[TokenLogprob], exact: bool) -> None:
    assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
    if exact:
        assert one == other
        return
    for a, b in zip(one, other, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-3)


def test_chunked_is_whole_and_company_changes_nothing(executor: Executor, texts: list[list[int]]) -> None:
    exact = executor.info.executor == "native"
    prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=False)]
    alone = [scores(executor, [prompt], 256, 3)[0] for prompt in prompts]
    assert [len(entries) for entries in alone] == [len(prompt) + 2 for prompt in prompts]
    for chunk in (256, 17):
        for own, together in zip(alone, scores(executor, prompts, chunk, 3), strict=True):
            assert_same(own, together, exact)


def test_an_answer_scored_as_a_prompt(executor: Executor, texts: list[list[int]]) -> None:
    prompt = texts[3]
    made = scores(executor, [prompt], 256, 6)[0]
    scored = scores(executor, [prompt + [entry.token_id for entry in made[-6:]]], 256, 0)[0]
    assert_same(made, scored, executor.info.executor == "native")


def test_prompt_log_probabilities_are_those_of_transformers(
    float32_executor: TorchExecutor, reference, texts: list[list[int]]
) -> None:
    prompt = texts[1][:60]
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], dim=-1)
    for position, entry in enumerate(scores(float32_executor, [prompt], 32, 0)[0], start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
