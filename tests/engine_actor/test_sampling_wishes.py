"""Penalties, biases, min_p, min_tokens and log probabilities: exact values, beside any neighbour.

The model of these tests is a function from the tokens before a position to logits, which it reads back through the
page table: what a request gets can then be computed from its own tokens alone, token by token.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scheduler_harness import DelayedRunner, Pipeline

from engine_actor.attention.base import token_slots
from engine_actor.executor import PAGE_SIZE, Executor, ExecutorInfo
from engine_actor.request import EngineRequest, SamplingParams, StreamRow, TokenLogprob
from engine_actor.runner import ModelRunner
from engine_actor.sampling.logprobs import token_logprobs
from engine_actor.sampling.sampler import sample
from engine_actor.sampling.state import RowLogprobs, SamplingState, with_wishes
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.sequence import derive_seed
from engine_actor.step import SamplingColumns, StepRecord

VOCAB = 40


class PrefixModel(Executor):
    """Logits are drawn by a seed made of all tokens up to the position; the KV of a token is the token."""

    def __init__(self, num_pages: int) -> None:
        self.info = ExecutorInfo("prefix", "none", "cpu", "float32", "none", 1)
        self.num_pages = num_pages
        self.kv = np.full(num_pages * PAGE_SIZE, -1)
        self.most_logits = 0

    def execute(self, record: StepRecord) -> torch.Tensor:
        self.kv[token_slots(record)] = record.token_ids
        rows = np.searchsorted(record.token_indptr, record.logit_tokens, side="right") - 1
        logits = []
        for row, token in zip(rows, record.logit_tokens, strict=True):
            end = int(record.start[row] + token - record.token_indptr[row] + 1)
            pages = record.page_indices[record.page_indptr[row] : record.page_indptr[row + 1]]
            slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[:end]
            logits.append(self.logits(self.kv[slots].tolist()))
        self.most_logits = max(self.most_logits, len(logits))
        return torch.from_numpy(np.array(logits, np.float32).reshape(-1, VOCAB))

    @staticmethod
    def logits(tokens: list[int]) -> np.ndarray:
        seed = zlib.crc32(np.array(tokens, np.int32).tobytes())
        return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def request(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    sampling = SamplingParams(**({"max_tokens": 12} | params))
    return EngineRequest(name, 1, name, f"tenant-{name[0]}", prompt, sampling, predicted_output_tokens=1)


def run(
    requests: list[EngineRequest], *, pages: int = 64, chunk: int = 64, depth: int = 1
) -> tuple[dict[str, list[StreamRow]], Scheduler]:
    scheduler = Scheduler(SchedulerConfig(16, chunk, 512, chunk), pages)
    pipeline = Pipeline(scheduler, DelayedRunner(ModelRunner(PrefixModel(pages))), depth)
    rows: dict[str, list[StreamRow]] = {}
    for item in requests:
        scheduler.submit(item, 0.0)
    while scheduler.has_work:
        for row in pipeline.turn()[2]:
            rows.setdefault(row.request, []).append(row)
    scheduler.cache.check_idle()
    return rows, scheduler


def tokens_of(rows: list[StreamRow]) -> list[int]:
    return [token for row in rows for token in row.token_ids]


def adjusted(tokens: list[int], item: EngineRequest) -> np.ndarray:
    """The logits for the next token, by the definitions, one token of the vocabulary at a time."""
    params, logits = item.sampling, PrefixModel.logits(tokens).astype(np.float64)
    output = tokens[len(item.prompt_token_ids) :]
    for token in range(VOCAB):
        if token in tokens:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
        logits[token] += dict(params.logit_bias).get(token, 0.0)
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            logits[token] = -math.inf
    return logits


def expected_tokens(item: EngineRequest) -> list[int]:
    """The answer of a request on its own, from the definitions and the plain sampler."""
    params, tokens = item.sampling, list(item.prompt_token_ids)
    while len(tokens) < len(item.prompt_token_ids) + params.max_tokens:
        logits = adjusted(tokens, item)
        probabilities = np.exp((logits - logits.max()) / max(params.temperature, 1e-6))
        if params.temperature > 0:
            logits = np.where(probabilities < params.min_p, -1e4, logits)
        columns = SamplingColumns(
            temperature=np.array([params.temperature], np.float32),
            top_k=np.array([params.top_k], np.int32),
            top_p=np.array([params.top_p], np.float32),
            seed=np.array([derive_seed(item)], np.uint64),
            position=np.array([len(tokens)], np.int32),
        )
        finite = np.maximum(logits, -1e4).astype(np.float32)
        tokens.append(int(sample(torch.from_numpy(finite)[None], columns)[0][0]))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(item.prompt_token_ids) :]


def random_request(name: str, random: np.random.Generator) -> EngineRequest:
    """Any mix of wishes; a third of the requests are plain, a third greedy."""
    choose = random.choice
    params: dict[str, Any] = {
        "max_tokens": int(random.integers(1, 40)),
        "temperature": float(choose([0.0, 0.7, 1.5])),
        "top_k": int(choose([0, 3])),
        "top_p": float(choose([1.0, 0.8])),
        "seed": int(random.integers(0, 1000)),
        "stop_token_ids": tuple(int(token) for token in random.integers(0, VOCAB, 2)),
    }
    if random.random() < 0.7:
        params |= {
            "min_p": float(choose([0.0, 0.2])),
            "min_tokens": int(random.integers(0, params["max_tokens"] + 1)),
            "presence_penalty": float(choose([0.0, 1.5, -1.0])),
            "frequency_penalty": float(choose([0.0, 0.7])),
            "repetition_penalty": float(choose([1.0, 1.3, 0.8])),
            "logit_bias": tuple(
                (int(token), float(random.normal(0, 5))) for token in set(random.integers(0, VOCAB, 3))
            ),
            "logprobs": choose([None, 0, 3]),
            "prompt_logprobs": choose([None, 0, 2]),
        }
    prompt = random.integers(0, VOCAB, int(random.integers(1, 60))).tolist()
    return request(name, prompt, **params)


def assert_logprobs(rows: list[StreamRow], item: EngineRequest) -> None:
    """Log probabilities of output and prompt are those of the model's own logits."""
    prompt, params = item.prompt_token_ids, item.sampling
    output = [entry for row in rows for entry in row.logprobs]
    of_prompt = [entry for row in rows for entry in row.prompt_logprobs]
    tokens = prompt + tokens_of(rows)
    assert len(output) == (0 if params.logprobs is None else len(tokens) - len(prompt))
    assert len(of_prompt) == (0 if params.prompt_logprobs is None else len(prompt) - 1)
    for first, entries, top in (
        (1, of_prompt, params.prompt_logprobs),
        (len(prompt), output, params.logprobs),
    ):
        for position, entry in enumerate(entries, start=first):
            assert_entry(entry, tokens[:position], tokens[position], top or 0)


def assert_entry(entry: TokenLogprob, before: list[int], token: int, top: int) -> None:
    exact = torch.log_softmax(torch.from_numpy(PrefixModel.logits(before)).double(), dim=0)
    assert entry.token_id == token and entry.logprob == pytest.approx(float(exact[token]), abs=1e-5)
    likeliest = exact.topk(top)
    assert [token for token, _ in entry.top] == likeliest.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(likeliest.values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("pages", "chunk", "depth"),
    [(64, 64, 1), (10, 64, 1), (64, 7, 1), (10, 5, 1), (64, 64, 2), (10, 5, 2)],
)
def test_c10_no_wish_touches_another_row_in_any_batch_after_any_preemption(
    pages: int, chunk: int, depth: int
) -> None:
    preemptions = 0
    for seed in range(6):
        random = np.random.default_rng(seed)
        requests = [random_request(f"{index}", random) for index in range(10)]
        rows, scheduler = run(requests, pages=pages, chunk=chunk, depth=depth)
        preemptions += scheduler.preemptions
        for item in requests:
            assert tokens_of(rows[item.request]) == expected_tokens(item), item.sampling
            assert_logprobs(rows[item.request], item)
    assert (preemptions > 0) == (pages == 10)


def test_prompt_logprobs_are_not_skipped_by_a_warm_cache() -> None:
    prompt = list(range(VOCAB)) * 2
    scheduler = Scheduler(SchedulerConfig(4, 32, 512, 32), 64)
    runner = ModelRunner(PrefixModel(64))
    for name in ("cold", "warm"):
        item = request(name, prompt, max_tokens=2, prompt_logprobs=1)
        scheduler.submit(item, 0.0)
        rows: list[StreamRow] = []
        while scheduler.has_work:
            record = scheduler.schedule(0.0)
            assert record is not None
            rows += scheduler.commit(record, runner.run(record), 0.0)
        assert_logprobs(rows, item)
        assert rows[-1].usage is not None and rows[-1].usage.cached_input == 0


def test_prompt_logprobs_come_once_whatever_is_computed_again() -> None:
    item = request("a", list(range(10)), prompt_logprobs=0)
    state = SamplingState(item)

    def take(start: int, end: int) -> list[int]:
        entries = tuple(TokenLogprob(token, 0.0) for token in range(start + 1, min(end, 9) + 1))
        return [entry.token_id for entry in state.take_prompt(RowLogprobs(prompt=entries), start).prompt]

    assert take(0, 4) == [1, 2, 3, 4]
    assert take(0, 3) == []  # preempted: from the beginning, in other chunks
    assert take(3, 7) == [5, 6, 7]
    assert take(7, 10) == [8, 9]
    assert state.prompt_logprobs_left == 0


def test_the_logits_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_actor.prefill.MAX_PROMPT_LOGITS", 8)
    scheduler = Scheduler(SchedulerConfig(16, 256, 512, 256), 64)
    model = PrefixModel(64)
    runner = ModelRunner(model)
    requests = [request(str(i), list(range(i, i + 37)), max_tokens=1, prompt_logprobs=0) for i in range(3)]
    rows: dict[str, list[StreamRow]] = {item.request: [] for item in requests}
    for item in requests:
        scheduler.submit(item, 0.0)
    while scheduler.has_work:
        record = scheduler.schedule(0.0)
        assert record is not None
        for row in scheduler.commit(record, runner.run(record), 0.0):
            rows[row.request].append(row)
    for item in requests:
        assert_logprobs(rows[item.request], item)
    assert model.most_logits <= 8 + len(requests)


def test_no_output_wanted() -> None:
    """max_tokens 0: the prompt is computed, nothing is generated, and it may fill the context."""
    items = [request("a", [1, 2, 3], max_tokens=0, prompt_logprobs=1), request("b", [5] * 512, max_tokens=0)]
    rows, _ = run(items)
    for item in items:
        assert_logprobs(rows[item.request], item)
        last = rows[item.request][-1]
        assert tokens_of(rows[item.request]) == [] and last.finish_reason == "length"
        assert last.usage is not None and (last.usage.output, last.usage.computed_input) == (
            0,
            len(item.prompt_token_ids),
        )


def test_a_request_whose_logits_are_not_finite_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    good = PrefixModel.logits

    def logits(tokens: list[int]) -> np.ndarray:
        return np.full(VOCAB, np.nan, np.float32) if tokens[0] == 9 and len(tokens) > 3 else good(tokens)

    items = [
        request("sampled", [9, 1, 2]),
        request("in the prompt", [9, 1, 2, 3, 4], prompt_logprobs=1),
        request("well", [1, 2, 3], logprobs=2),
    ]
    expected = expected_tokens(items[2])
    monkeypatch.setattr(PrefixModel, "logits", staticmethod(logits))
    rows, scheduler = run(items)
    for name in ("sampled", "in the prompt"):
        assert rows[name][-1].finish_reason == "error" and "non-finite" in (rows[name][-1].error or "")
    assert tokens_of(rows["well"]) == expected
    assert scheduler.nonfinite_requests == 2


def test_plain_requests_carry_nothing() -> None:
    params = {"temperature": 0.3, "top_k": 5, "top_p": 0.5, "seed": 3, "stop_token_ids": (1,)}
    assert SamplingState.of(request("a", [1], **params)) is None
    for wish in (
        {"min_p": 0.1},
        {"logprobs": 0},
        {"min_tokens": 1},
        {"logit_bias": ((1, 2.0),)},
        {"presence_penalty": 1},
    ):
        assert SamplingState.of(request("a", [1], **params, **wish)) is not None


def test_only_rows_with_penalties_bring_their_tokens() -> None:
    plain = SamplingColumns(
        temperature=np.zeros(3, np.float32),
        top_k=np.zeros(3, np.int32),
        top_p=np.ones(3, np.float32),
        seed=np.zeros(3, np.uint64),
        position=np.zeros(3, np.int32),
    )
    assert with_wishes(plain, []) is plain
    biased, penalised = (
        SamplingState(request("a", [4, 5, 4], logit_bias=((7, 1.0),))),
        SamplingState(request("b", [4, 5, 4], presence_penalty=1.0)),
    )
    penalised.append(5)
    penalised.append(6)
    columns = with_wishes(plain, [(0, biased), (2, penalised)])
    assert columns.min_p is None and columns.logprobs is None
    assert columns.bias is not None and columns.bias.row.tolist() == [0]
    assert columns.penalties is not None and columns.penalties.row.tolist() == [2]
    counted = dict(zip(columns.penalties.token.tolist(), columns.penalties.count.tolist(), strict=True))
    assert counted == {4: 0, 5: 1, 6: 1}


def test_a_bias_of_a_hundred_decides() -> None:
    forced = request("forced", [1, 2], logit_bias=((17, 100.0),), temperature=2.0)
    banned = replace(
        forced, request="banned", sampling=replace(forced.sampling, logit_bias=((17, -100.0),), seed=1)
    )
    rows, _ = run([forced, banned])
    assert set(tokens_of(rows["forced"])) == {17} and 17 not in tokens_of(rows["banned"])


def test_entries_of_many_rows_equal_those_of_each() -> None:
    logits = torch.randn(150, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = np.arange(150, dtype=np.int32) % VOCAB
    together = token_logprobs(logits, tokens, 4)
    for row in (0, 63, 64, 149):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], 4)
        for name in ("logprob", "top_token", "top_logprob"):
            np.testing.assert_array_equal(getattr(together, name)[row], getattr(alone, name)[0])
    assert token_logprobs(logits[:2], tokens[:2], 0).top_token.shape == (2, 0)
    assert token_logprobs(logits[:2], tokens[:2], VOCAB + 5).top_token.shape == (2, VOCAB)
