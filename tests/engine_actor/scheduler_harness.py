"""A scheduler with a runner that really reads the pages it is told to: any wrong table changes the answer."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from engine_actor.executor import PAGE_SIZE, ExecutorInfo, Runner
from engine_actor.request import EngineRequest, SamplingParams, StreamRow
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepRecord, StepResult

VOCAB = 50


def next_token(context: list[int]) -> int:
    """The 'model': a token that depends on every token before it."""
    return hashlib.blake2b(np.array(context, np.int32).tobytes()).digest()[0] % VOCAB


class PageReadingRunner(Runner):
    """Keeps one token per KV slot; the next token is a function of what the page table leads to."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.info = ExecutorInfo("test", "none", "cpu", "none", "none", 1)
        self.slots = np.full(num_pages * PAGE_SIZE, -1, np.int32)

    def run(self, record: StepRecord) -> StepResult:
        written: set[int] = set()
        tables = []
        for row in range(record.num_rows):
            pages = record.page_indices[record.page_indptr[row] : record.page_indptr[row + 1]]
            start, length = int(record.start[row]), int(record.length[row])
            assert len(pages) == -(-(start + length) // PAGE_SIZE) and 0 not in pages
            slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
            tables.append(slots)
            new = slots[start : start + length]
            assert not written.intersection(new.tolist()), "two rows write one slot"
            written.update(new.tolist())
            self.slots[new] = record.token_ids[record.token_indptr[row] : record.token_indptr[row + 1]]
        tokens = []
        for row in np.flatnonzero(record.is_last_chunk):
            end = int(record.start[row] + record.length[row])
            tokens.append(next_token(self.slots[tables[row][:end]].tolist()))
        return StepResult(record.step, np.array(tokens, np.int32), np.ones(len(tokens), np.bool_), 0.0)


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    tenant: str = "a",
    weight: float = 1.0,
    kv_share: float = 1.0,
    stop: int | None = None,
    predicted: int = 64,
) -> EngineRequest:
    return EngineRequest(
        request=name,
        attempt=1,
        ticket=name,
        tenant=tenant,
        namespace=tenant,
        weight=weight,
        kv_share=kv_share,
        prompt_token_ids=prompt,
        predicted_output_tokens=predicted,
        sampling=SamplingParams(max_tokens, temperature=0.0, stop_token_ids=() if stop is None else (stop,)),
    )


def expected(prompt: list[int], max_tokens: int, stop: int | None = None) -> list[int]:
    context = list(prompt)
    while len(context) - len(prompt) < max_tokens:
        context.append(next_token(context))
        if context[-1] == stop:
            break
    return context[len(prompt) :]


def make(num_pages: int = 200, **changes: object) -> tuple[Scheduler, PageReadingRunner]:
    limits: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 512,
        "prefill_chunk_size": 32,
    }
    config = SchedulerConfig(**{**limits, **changes})  # type: ignore[arg-type]
    return Scheduler(config, num_pages), PageReadingRunner(num_pages)


class DelayedRunner(Runner):
    """Begins steps as a device does: each runs at some moment between its start and the call for its result.

    `late` decides, at a start, whether the step waits for that call. Tokens that a record does not know come from the
    step before.
    """

    def __init__(self, runner: Runner, late: Callable[[], bool] = lambda: True) -> None:
        self.info, self.num_pages = runner.info, runner.num_pages
        self._runner, self._late = runner, late
        self._waiting: deque[StepRecord] = deque()
        self._results: dict[int, StepResult] = {}
        self._sampled = np.zeros(0, np.int32)

    def run(self, record: StepRecord) -> StepResult:
        return self._runner.run(record)

    def start(self, record: StepRecord) -> Callable[[], StepResult]:
        self._waiting.append(record)
        if not self._late():
            self._run_until(record.step)

        def result() -> StepResult:
            self._run_until(record.step)
            return self._results.pop(record.step)

        return result

    def _run_until(self, step: int) -> None:
        while step not in self._results:
            record = self._waiting.popleft()
            unknown = record.token_ids < 0
            token_ids = record.token_ids.copy()
            token_ids[unknown] = self._sampled[-1 - token_ids[unknown]]
            result = self.run(replace(record, token_ids=token_ids))
            self._results[record.step], self._sampled = result, result.token_ids.copy()


class Pipeline:
    """Drives a scheduler as the step loop does, with up to `depth` steps in flight; 2 needs an asynchronous runner.

    No page may be free, or be written for another request, while a step in flight names it.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int = 1) -> None:
        self._scheduler, self._runner, self._depth = scheduler, runner, depth
        self._flights: deque[tuple[StepRecord, Callable[[], StepResult]]] = deque()
        self.overlapped = 0

    def turn(self, budget: int | None = None) -> tuple[StepRecord | None, StepResult | None, list[StreamRow]]:
        """Schedule a step, then commit the oldest: its record and result, and all rows that came."""
        record = self._scheduler.schedule(0.0, budget)
        rows = self._scheduler.take_finished()
        if record is not None:
            self._check_written(record)
            self._flights.append((record, self._runner.start(record)))
            self.overlapped += len(self._flights) > 1
            if len(self._flights) < self._depth:
                return None, None, rows
        self._check_free()
        if not self._flights:
            return None, None, rows
        record, result, new = self.commit()
        return record, result, rows + new

    def commit(self) -> tuple[StepRecord, StepResult, list[StreamRow]]:
        """Commit the oldest step in flight."""
        record, wait = self._flights.popleft()
        result = wait()
        rows = self._scheduler.commit(record, result, 0.0)
        self._check_free()
        return record, result, rows

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def _check_free(self) -> None:
        free = set(self._scheduler.cache._pool._free)
        for record, _ in self._flights:
            assert not free.intersection(record.page_indices.tolist())

    def _check_written(self, new: StepRecord) -> None:
        for record, _ in self._flights:
            users: dict[int, set[int]] = {}
            for request, pages in zip(record.request.tolist(), tables(record), strict=True):
                for page in pages:
                    users.setdefault(page, set()).add(request)
            starts = new.start.tolist()
            for request, pages, start in zip(new.request.tolist(), tables(new), starts, strict=True):
                for page in pages[start // PAGE_SIZE :]:
                    assert users.get(page, {request}) == {request}, f"page {page} is written while in use"


def tables(record: StepRecord) -> list[list[int]]:
    """The page table of each row."""
    bounds = record.page_indptr.tolist()
    pages = record.page_indices.tolist()
    return [pages[begin:end] for begin, end in pairwise(bounds)]


def step(scheduler: Scheduler, runner: Runner) -> tuple[StepRecord | None, list[StreamRow]]:
    record = scheduler.schedule(0.0)
    rows = scheduler.take_finished()
    if record is not None:
        rows += scheduler.commit(record, runner.run(record), 0.0)
    return record, rows


def drain(
    scheduler: Scheduler, runner: Runner, limit: int = 2000, pipeline: Pipeline | None = None
) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens of every request."""
    pipeline = pipeline or Pipeline(scheduler, runner)
    answers: dict[str, list[int]] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            scheduler.cache.check_idle()
            return answers
        for row in pipeline.turn()[2]:
            answers.setdefault(row.request, []).extend(row.token_ids)
    raise AssertionError("no end: requests are stuck")


def check_accounts(scheduler: Scheduler) -> None:
    """Every running total equals the sum over the live requests."""
    live = list(scheduler._live.by_id.values())
    scheduler.cache.check(private=sum(len(s.table.pages) - s.table.shared for s in live))
    assert scheduler.state.waiting_prefill_tokens() == sum(s.pending for s in live if not s.decoding)
    tenants = {s.request.tenant: [o for o in live if o.tenant is s.tenant] for s in live}
    assert scheduler.state.live_sequences() == {name: len(own) for name, own in tenants.items()}
    pages = {name: sum(len(s.table.pages) for s in own) for name, own in tenants.items()}
    assert scheduler.state.tenant_pages() == {name: count for name, count in pages.items() if count}
    for name, own in tenants.items():
        tenant = own[0].tenant
        assert tenant.input_left == sum(max(0, s.prompt_tokens - s.served) for s in own), name
        predicted = [min(s.request.predicted_output_tokens, s.max_tokens) - s.output_tokens for s in own]
        output = sum(max(0, left) for left in predicted)
        assert scheduler.state.outstanding()[name] == tenant.input_left + 2 * output


PROMPTS = {f"r{i}": [(i * 7 + j) % VOCAB for j in range(3 + 13 * i)] for i in range(8)}
