"""The scheduler against a runner that really reads the pages it is told to: any wrong table changes the answer."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    live = list(scheduler._live.values())
    scheduler.cache.check(private=sum(len(s.table.pages) - s.table.shared for s in live))
    assert scheduler.waiting_prefill_tokens() == sum(s.pending for s in live if not s.decoding)
    tenants = {s.request.tenant: [o for o in live if o.tenant is s.tenant] for s in live}
    assert scheduler.live_sequences() == {name: len(own) for name, own in tenants.items()}
    pages = {name: sum(len(s.table.pages) for s in own) for name, own in tenants.items()}
    assert scheduler.tenant_pages() == {name: count for name, count in pages.items() if count}
    for name, own in tenants.items():
        tenant = own[0].tenant
        assert tenant.input_left == sum(max(0, s.prompt_tokens - s.served) for s in own), name
        predicted = [min(s.request.predicted_output_tokens, s.max_tokens) - s.output_tokens for s in own]
        assert tenant.output_left == sum(max(0, left) for left in predicted), name


PROMPTS = {f"r{i}": [(i * 7 + j) % VOCAB for j in range(3 + 13 * i)] for i in range(8)}


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 32])
def test_answers_do_not_depend_on_batch_or_chunk(chunk: int) -> None:
    scheduler, runner = make(prefill_chunk_size=chunk)
    for name, prompt in PROMPTS.items():
        scheduler.submit(request(name, prompt), 0.0)
    assert drain(scheduler, runner) == {name: expected(prompt, 8) for name, prompt in PROMPTS.items()}


def test_answers_do_not_depend_on_preemption() -> None:
    scheduler, runner = make(num_pages=16)
    for name, prompt in PROMPTS.items():
        scheduler.submit(request(name, prompt, 60, predicted=1), 0.0)
    assert drain(scheduler, runner) == {name: expected(prompt, 60) for name, prompt in PROMPTS.items()}
    assert scheduler.preemptions > 0
    assert scheduler.service.recomputed_chunks > 0


def test_warm_prefix_gives_the_same_answer_and_is_counted() -> None:
    scheduler, runner = make()
    prompt = PROMPTS["r7"]
    scheduler.submit(request("cold", prompt), 0.0)
    cold = drain(scheduler, runner)["cold"]
    scheduler.submit(request("warm", prompt), 0.0)
    usages = []
    warm: list[int] = []
    while scheduler.has_work:
        for row in step(scheduler, runner)[1]:
            warm += row.token_ids
            usages += [row.usage] if row.usage else []
    assert warm == cold
    assert usages[0].cached_input == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    assert usages[0].computed_input == len(prompt) - usages[0].cached_input


def test_service_is_charged_by_kind_and_recomputation_to_nobody() -> None:
    scheduler, runner = make(num_pages=16)
    for name, prompt in PROMPTS.items():
        scheduler.submit(request(name, prompt, 40, tenant=name, predicted=1), 0.0)
    drain(scheduler, runner)
    assert scheduler.preemptions > 0
    for name, prompt in PROMPTS.items():
        assert scheduler.served[name] == len(prompt) + 2 * 40


def test_stop_token_and_length_reasons() -> None:
    scheduler, runner = make()
    stop = expected(PROMPTS["r1"], 8)[3]
    scheduler.submit(request("stopped", PROMPTS["r1"], 8, stop=stop), 0.0)
    scheduler.submit(request("long", PROMPTS["r2"], 8), 0.0)
    reasons: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    while scheduler.has_work:
        for row in step(scheduler, runner)[1]:
            tokens.setdefault(row.request, []).extend(row.token_ids)
            if row.finish_reason:
                reasons[row.request] = row.finish_reason
    assert reasons == {"stopped": "stop", "long": "length"}
    assert tokens["stopped"] == expected(PROMPTS["r1"], 8, stop)


def test_C01_impossible_request_ends_at_once_and_blocks_nobody() -> None:
    scheduler, runner = make(num_pages=9, max_model_len=4096)
    scheduler.submit(request("impossible", [1] * 400), 0.0)
    scheduler.submit(request("canary", [2] * 5), 0.0)
    _, rows = step(scheduler, runner)
    assert rows[0].request == "impossible" and rows[0].finish_reason == "error"
    assert drain(scheduler, runner)["canary"] == expected([2] * 5, 8)[1:]


def test_C01_request_that_outgrows_the_pool_ends_with_length() -> None:
    scheduler, runner = make(num_pages=5, max_model_len=4096)
    scheduler.submit(request("grows", [1] * 30, 1000), 0.0)
    rows = []
    while scheduler.has_work:
        rows += step(scheduler, runner)[1]
    assert rows[-1].finish_reason == "length"
    assert 30 + sum(len(row.token_ids) for row in rows) == 4 * PAGE_SIZE


def test_submitting_twice_has_no_effect() -> None:
    scheduler, runner = make()
    assert scheduler.submit(request("r", [1, 2, 3]), 0.0)
    assert not scheduler.submit(request("r", [1, 2, 3]), 0.0)
    assert drain(scheduler, runner)["r"] == expected([1, 2, 3], 8)
    assert not scheduler.submit(request("r", [1, 2, 3]), 0.0)


def test_abort_in_every_phase_frees_everything() -> None:
    for steps_before in range(12):
        scheduler, runner = make()
        scheduler.submit(request("r", [3] * 100, 50), 0.0)
        for _ in range(steps_before):
            step(scheduler, runner)
        scheduler.abort("r", 1)
        _, rows = step(scheduler, runner)
        assert rows[-1].finish_reason == "abort" and rows[-1].usage is not None
        assert rows[-1].usage.computed_input == min(100, 32 * steps_before)
        assert not scheduler.has_work
        scheduler.cache.check_idle()


def test_abort_between_schedule_and_commit_waits_for_the_step() -> None:
    scheduler, runner = make()
    scheduler.submit(request("r", [3] * 20, 50), 0.0)
    record = scheduler.schedule(0.0)
    assert record is not None
    scheduler.abort("r", 1)
    assert scheduler.cache.total - scheduler.cache.free == 2  # the record in flight still names them
    assert scheduler.commit(record, runner.run(record), 0.0) == []
    assert scheduler.schedule(0.0) is None
    assert [row.finish_reason for row in scheduler.take_finished()] == ["abort"]
    scheduler.cache.check_idle()


def test_decode_leaves_a_floor_for_prefill_and_every_decode_has_its_turn() -> None:
    scheduler, runner = make(max_num_batched_tokens=20, max_num_seqs=30, prefill_chunk_size=20)
    for i in range(18):
        scheduler.submit(request(f"d{i}", [i + 1], 60), 0.0)
    for _ in range(3):
        step(scheduler, runner)
    scheduler.submit(request("long", [9] * 200, 4), 0.0)
    progress = {f"d{i}": 0 for i in range(18)}
    for _ in range(30):
        record, rows = step(scheduler, runner)
        assert record is not None
        if scheduler.waiting_prefill_tokens() > 20:
            assert sum(length for length in record.length if length > 1) >= 10
        for row in rows:
            if row.request in progress:
                progress[row.request] += len(row.token_ids)
    assert max(progress.values()) - min(progress.values()) <= 1


def test_prefill_budget_is_split_among_tenants_by_weight() -> None:
    scheduler, runner = make(max_num_batched_tokens=40, prefill_chunk_size=40)
    scheduler.submit(request("one", [1] * 400, tenant="one", weight=1.0), 0.0)
    scheduler.submit(request("three", [2] * 400, tenant="three", weight=3.0), 0.0)
    record, _ = step(scheduler, runner)
    assert record is not None
    assert sorted(record.length.tolist()) == [10, 30]


@pytest.mark.parametrize("budget", [1, 3, 7, 1000])
def test_a_step_stays_within_the_token_budget_it_is_given(budget: int) -> None:
    scheduler, runner = make()
    for name, prompt in PROMPTS.items():
        scheduler.submit(request(name, prompt), 0.0)
    answers: dict[str, list[int]] = {}
    while scheduler.has_work:
        record = scheduler.schedule(0.0, budget)
        assert record is not None and record.num_tokens <= min(budget, 32)
        for row in scheduler.commit(record, runner.run(record), 0.0):
            answers.setdefault(row.request, []).extend(row.token_ids)
    assert answers == {name: expected(prompt, 8) for name, prompt in PROMPTS.items()}


def test_live_sequences_and_pages_per_tenant() -> None:
    scheduler, runner = make(max_num_seqs=2)
    for name in ("one", "two", "three"):
        scheduler.submit(request(name, [1] * 10, tenant="a" if name == "two" else "b"), 0.0)
    step(scheduler, runner)
    assert scheduler.live_sequences() == {"a": 1, "b": 2}
    assert scheduler.tenant_pages() == {"a": 1, "b": 1}
    drain(scheduler, runner)
    assert scheduler.live_sequences() == scheduler.tenant_pages() == {}


def test_pages_that_accepted_requests_still_need_are_not_reported_as_free() -> None:
    scheduler, runner = make(num_pages=11, kv_cache_utilization_limit=0.8)
    assert scheduler.unclaimed_pages() == 8
    scheduler.submit(request("a", [1] * 40), 0.0)  # 3 pages, and its first output token is in the third
    assert scheduler.unclaimed_pages() == 5, "claimed before a page is taken"
    step(scheduler, runner)
    assert (scheduler.cache.available, scheduler.unclaimed_pages()) == (8, 5), (
        "the rest of the chunk is claimed"
    )
    scheduler.submit(request("b", [2] * 100), 0.0)
    assert scheduler.unclaimed_pages() == 0, "a request that waits for pages claims them"


def test_non_finite_logits_end_only_that_request() -> None:
    scheduler, runner = make()
    scheduler.submit(request("bad", [1, 2]), 0.0)
    scheduler.submit(request("good", [3, 4]), 0.0)
    record = scheduler.schedule(0.0)
    assert record is not None
    result = runner.run(record)
    result.finite[0] = False
    rows = scheduler.commit(record, result, 0.0)
    assert [(row.request, row.finish_reason) for row in rows] == [("bad", "error"), ("good", None)]
    assert drain(scheduler, runner)["good"] == expected([3, 4], 8)[1:]


class SchedulerMachine(RuleBasedStateMachine):
    """D06, D07: a tiny pool, shared prefixes, aborts at any time: answers stay right and no page is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.runner = make(
            num_pages=14, max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk_size=13
        )
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    @rule(
        shape=st.lists(st.integers(0, 1), max_size=3),
        tail=st.integers(1, 20),
        tokens=st.integers(1, 40),
        tenant=st.sampled_from("ab"),
        predicted=st.sampled_from([1, 40]),
    )
    def submit(self, shape: list[int], tail: int, tokens: int, tenant: str, predicted: int) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = [value for page in shape for value in [page] * PAGE_SIZE] + [7] * tail
        self.scheduler.submit(
            request(name, self.prompts[name], tokens, tenant=tenant, predicted=predicted), 0.0
        )

    @precondition(lambda self: self.prompts)
    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        name = f"r{index % len(self.prompts)}"
        self.scheduler.abort(name, 1)
        self.aborted.add(name)

    @rule(count=st.integers(1, 6))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            before = self.scheduler.has_work
            record, rows = step(self.scheduler, self.runner)
            assert record is not None or rows or not before, "work waits and nothing moves"
            for row in rows:
                self.answers.setdefault(row.request, []).extend(row.token_ids)

    @invariant()
    def accounting(self) -> None:
        check_accounts(self.scheduler)

    def teardown(self) -> None:
        for name, tokens in drain(self.scheduler, self.runner).items():
            self.answers.setdefault(name, []).extend(tokens)
        for name, prompt in self.prompts.items():
            answer = self.answers.get(name, [])
            assert answer == expected(prompt, len(answer))
            assert answer or name in self.aborted


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
