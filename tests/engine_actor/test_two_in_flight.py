"""Random workloads with one and with two steps in flight: every answer is the one that its request defines.

The model is a function of the tokens that the page table leads to, so a wrong page, position, token or column changes
the answer. Requests stop at tokens and lengths, carry penalties and forbidden tokens (which a step needs the one
before it for), meet logits that are not finite, are aborted and preempted, and share prefixes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from scheduler_harness import (
    VOCAB,
    DelayedRunner,
    PageReadingRunner,
    Pipeline,
    check_accounts,
    next_token,
    request,
)

from engine_actor.executor import PAGE_SIZE
from engine_actor.request import EngineRequest, RequestUsage, StreamRow
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepRecord, StepResult

CURSED = VOCAB
"""A prompt token: behind it, some contexts give logits that are not finite."""
MAX_OUTPUT = 40


def is_finite(context: list[int]) -> bool:
    return CURSED not in context or next_token([*context, CURSED]) > 2


def choose(context: list[int], generated: int, forbidden: set[int]) -> int:
    """The token behind a context. `generated` counts the output where penalties are wanted, else it is 0."""
    token = (next_token(context) + generated) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def answer_of(wanted: EngineRequest) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that nobody aborts."""
    params, prompt = wanted.sampling, wanted.prompt_token_ids
    context = list(prompt)
    while (count := len(context) - len(prompt)) < max(1, params.max_tokens):
        if not is_finite(context):
            return context[len(prompt) :], "error"
        if not params.max_tokens:
            break
        forbidden = set(params.stop_token_ids) if count < params.min_tokens else set()
        context.append(choose(context, count if params.frequency_penalty else 0, forbidden))
        if context[-1] in params.stop_token_ids:
            return context[len(prompt) :], "stop"
    return context[len(prompt) :], "length"


class ColumnReadingRunner(PageReadingRunner):
    """Uses what a record says about penalties and biases too, and checks the counts against the pages."""

    def run(self, record: StepRecord) -> StepResult:
        result = super().run(record)
        contexts = [self._context(record, row) for row in np.flatnonzero(record.is_last_chunk).tolist()]
        forbidden: list[set[int]] = [set() for _ in contexts]
        if (bias := record.sampling.bias) is not None:
            for row, token in zip(bias.row.tolist(), bias.token.tolist(), strict=True):
                forbidden[row].add(token)
        generated = [0] * len(contexts)
        if (penalties := record.sampling.penalties) is not None:
            for i, row in enumerate(penalties.row.tolist()):
                part = slice(penalties.token_indptr[i], penalties.token_indptr[i + 1])
                counts = dict(
                    zip(penalties.token[part].tolist(), penalties.count[part].tolist(), strict=True)
                )
                generated[row] = sum(counts.values())
                output = contexts[row][len(contexts[row]) - generated[row] :]
                assert Counter(output) == Counter({token: count for token, count in counts.items() if count})
                assert counts.keys() == set(contexts[row])
        tokens = [choose(*row) for row in zip(contexts, generated, forbidden, strict=True)]
        finite = [is_finite(context) for context in contexts]
        return replace(result, token_ids=np.array(tokens, np.int32), finite=np.array(finite, np.bool_))

    def _context(self, record: StepRecord, row: int) -> list[int]:
        pages = record.page_indices[record.page_indptr[row] : record.page_indptr[row + 1]]
        slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
        context: list[int] = self.slots[slots[: record.start[row] + record.length[row]]].tolist()
        return context

    def poison(self, pages: list[int]) -> None:
        self.slots.reshape(-1, PAGE_SIZE)[pages] = -7


@dataclass(frozen=True)
class Workload:
    """Requests by the turn in which they arrive, and whom to abort in which turn."""

    config: SchedulerConfig
    num_pages: int
    arrivals: list[tuple[int, EngineRequest]]
    aborts: list[tuple[int, str]]


def workload(seed: int) -> Workload:
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_num_seqs=rng.choice([1, 2, 4, 8, 8]),
        max_num_batched_tokens=rng.choice([4, 20, 64, 512]),
        max_model_len=110,
        prefill_chunk_size=rng.choice([1, 5, 16, 17, 33, 512]),
        kv_cache_utilization_limit=rng.choice([0.7, 1.0, 1.0]),
        prefix_caching=rng.random() < 0.8,
        kv_watermark=rng.choice([0.0, 0.0, 0.1]),
        prefill_first=rng.random() < 0.1,
    )
    arrivals, aborts, turn = [], [], 0
    for index in range(rng.randint(3, 10)):
        turn += rng.choice([0, 0, 0, 1, 5])
        prompt = [token for page in range(rng.randint(0, 3)) for token in [page % 2 + 1] * PAGE_SIZE]
        prompt += [3 + rng.randint(0, 1)] * rng.choice([1, 7, 15, 16, 17])
        if rng.random() < 0.3:
            prompt[rng.randrange(len(prompt))] = CURSED
        plain = request(
            f"r{index}",
            prompt,
            rng.choice([0, 1, 17, MAX_OUTPUT, MAX_OUTPUT, MAX_OUTPUT]),
            tenant=rng.choice("abc"),
            weight=rng.choice([0.5, 1.0, 3.0]),
            kv_share=rng.choice([0.4, 1.0]),
            predicted=rng.choice([1, 1, 1, 20]),
        )
        sampling = replace(
            plain.sampling,
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 3]))),
            min_tokens=rng.choice([0, 0, 3]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, 1.0]),
        )
        arrivals.append((turn, replace(plain, sampling=sampling)))
        if rng.random() < 0.2:
            aborts.append((turn + rng.randint(0, 60), plain.request))
    return Workload(config, rng.choice([8, 8, 8, 9, 12, 41]), arrivals, aborts)


@dataclass
class Seen:
    """What rounds with two steps in flight have met."""

    preemptions: int = 0
    cached_tokens: int = 0
    overlapped: int = 0
    aborted_midway: int = 0
    reasons: Counter[str | None] = field(default_factory=Counter)


def play(work: Workload, depth: int, seed: int, seen: Seen) -> dict[str, tuple[list[int], str | None]]:
    """Run a workload; the answers by request. Pages, accounts and rows are checked on the way."""
    rng = random.Random(seed)
    scheduler, runner = Scheduler(work.config, work.num_pages), ColumnReadingRunner(work.num_pages)
    pipeline = Pipeline(scheduler, DelayedRunner(runner, lambda: rng.random() < 0.7), depth)
    rows: dict[str, list[StreamRow]] = {}
    arrivals, aborts, turn = list(work.arrivals), sorted(work.aborts), 0
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0][0] <= turn:
            assert scheduler.submit(arrivals.pop(0)[1], 0.0)
        while aborts and aborts[0][0] <= turn:
            scheduler.abort(aborts.pop(0)[1], 1)
        if rng.random() < 0.03:
            scheduler.cache.clear()
        new: list[StreamRow] = []
        if scheduler.running and rng.random() < 0.03:  # at moments of our choice, beside the scheduler's own
            while pipeline.in_flight:
                new += pipeline.commit()[2]
            if scheduler.running:
                scheduler._preempt(rng.choice(scheduler.running))
        for row in new + pipeline.turn(rng.choice([None, None, 1, 7]))[2]:
            rows.setdefault(row.request, []).append(row)
        check_accounts(scheduler)
        runner.poison(scheduler.cache._pool._free)
        turn += 1
        assert turn < 20_000, "no end: requests are stuck"
    scheduler.cache.check_idle()
    answers: dict[str, tuple[list[int], str | None]] = {}
    for _, wanted in work.arrivals:
        own = rows[wanted.request]
        assert [row.finish_reason is not None for row in own] == [False] * (len(own) - 1) + [True]
        tokens = [token for row in own for token in row.token_ids]
        usage = own[-1].usage or RequestUsage()
        assert usage.output == len(tokens)
        if own[-1].finish_reason != "abort":
            assert usage.computed_input + usage.cached_input == len(wanted.prompt_token_ids)
        answers[wanted.request] = tokens, own[-1].finish_reason
        seen.reasons[own[-1].finish_reason] += 1
        seen.aborted_midway += own[-1].finish_reason == "abort" and bool(tokens)
    assert scheduler.service.output_tokens == sum(len(tokens) for tokens, _ in answers.values())
    seen.preemptions += scheduler.preemptions
    seen.cached_tokens += scheduler.service.cached_tokens
    seen.overlapped += pipeline.overlapped
    return answers


def play_rounds(seeds: range) -> Seen:
    seen = Seen()
    for seed in seeds:
        work = workload(seed)
        one_at_a_time, two = play(work, 1, seed, Seen()), play(work, 2, seed, seen)
        aborted = {name for _, name in work.aborts}
        for _, wanted in work.arrivals:
            exact, reason = answer_of(wanted)
            for tokens, ended in (one_at_a_time[wanted.request], two[wanted.request]):
                if ended == "abort":
                    assert wanted.request in aborted and tokens == exact[: len(tokens)], (seed, wanted)
                else:
                    assert (tokens, ended) == (exact, reason), (seed, wanted)
    return seen


def check_hard_enough(seen: Seen, rounds: int) -> None:
    met = (seen.preemptions, seen.cached_tokens, seen.overlapped, *seen.reasons.values())
    assert seen.reasons.keys() == {"stop", "length", "error", "abort"}
    assert min(met) > rounds // 4 and seen.aborted_midway > rounds // 10, seen


def test_answers_with_two_steps_in_flight_are_those_with_one() -> None:
    check_hard_enough(play_rounds(range(40)), 40)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_workloads_with_two_steps_in_flight() -> None:
    check_hard_enough(play_rounds(range(10_000, 20_000)), 10_000)
