"""A scheduler with a runner that really reads the pages it is told to: any wrong table changes the answer."""

from __future__ import annotations

import hashlib

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


def step(scheduler: Scheduler, runner: Runner) -> tuple[StepRecord | None, list[StreamRow]]:
    record = scheduler.schedule(0.0)
    rows = scheduler.take_finished()
    if record is not None:
        rows += scheduler.commit(record, runner.run(record), 0.0)
    return record, rows


def drain(scheduler: Scheduler, runner: Runner, limit: int = 2000) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens of every request."""
    answers: dict[str, list[int]] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            scheduler.cache.check_idle()
            return answers
        for row in step(scheduler, runner)[1]:
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
