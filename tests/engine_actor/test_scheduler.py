"""The scheduler's life of a request: answers, service, limits, aborts, and the whole as a state machine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_harness import PROMPTS, Pipeline, check_accounts, drain, expected, make, request, step

from engine_actor.executor import PAGE_SIZE


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
        if scheduler.state.waiting_prefill_tokens() > 20:
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
    assert scheduler.state.live_sequences() == {"a": 1, "b": 2}
    assert scheduler.state.tenant_pages() == {"a": 1, "b": 1}
    drain(scheduler, runner)
    assert scheduler.state.live_sequences() == scheduler.state.tenant_pages() == {}


def test_pages_that_accepted_requests_still_need_are_not_reported_as_free() -> None:
    scheduler, runner = make(num_pages=11, kv_cache_utilization_limit=0.8)
    assert scheduler.state.unclaimed_pages() == 8
    scheduler.submit(request("a", [1] * 40), 0.0)  # 3 pages, and its first output token is in the third
    assert scheduler.state.unclaimed_pages() == 5, "claimed before a page is taken"
    step(scheduler, runner)
    assert (scheduler.cache.available, scheduler.state.unclaimed_pages()) == (8, 5), (
        "the rest of the chunk is claimed"
    )
    scheduler.submit(request("b", [2] * 100), 0.0)
    assert scheduler.state.unclaimed_pages() == 0, "a request that waits for pages claims them"


def test_request_level_batching_starts_nobody_before_all_have_ended() -> None:
    scheduler, runner = make(request_level_batching=True)
    scheduler.submit(request("short", [1] * 4, 2), 0.0)
    scheduler.submit(request("long", [2] * 4, 6), 0.0)
    step(scheduler, runner)
    scheduler.submit(request("next", [3] * 4, 2), 0.0)
    while scheduler.num_running:
        assert scheduler.num_waiting == 1
        rows = step(scheduler, runner)[1]
    assert [row.request for row in rows] == ["long"]
    assert drain(scheduler, runner) == {"next": expected([3] * 4, 2)}


def test_prefill_first_leaves_decodes_out_of_a_step_with_prompts() -> None:
    scheduler, runner = make(prefill_first=True)
    scheduler.submit(request("early", [1] * 4, 8), 0.0)
    step(scheduler, runner)
    scheduler.submit(request("late", [2] * 40, 8), 0.0)
    records = [step(scheduler, runner)[0] for _ in range(3)]
    assert [record.length.tolist() for record in records if record] == [[32], [8], [1, 1]]
    drain(scheduler, runner)


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
        self.pipeline = Pipeline(self.scheduler, self.runner)
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    @rule(
        shape=st.lists(st.integers(0, 1), max_size=3),
        tail=st.integers(1, 20),
        tokens=st.integers(1, 40),
        tenant=st.sampled_from("abc"),
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
            before, began = self.scheduler.has_work, self.scheduler.step
            record, _, rows = self.pipeline.turn()
            moved = record is not None or rows or self.scheduler.step > began
            assert moved or not before, "work waits and nothing moves"
            for row in rows:
                self.answers.setdefault(row.request, []).extend(row.token_ids)

    @invariant()
    def accounting(self) -> None:
        check_accounts(self.scheduler)

    def teardown(self) -> None:
        for name, tokens in drain(self.scheduler, self.runner, pipeline=self.pipeline).items():
            self.answers.setdefault(name, []).extend(tokens)
        for name, prompt in self.prompts.items():
            answer = self.answers.get(name, [])
            assert answer == expected(prompt, len(answer))
            assert answer or name in self.aborted


TestD06D07SchedulerMachine = SchedulerMachine.TestCase
TestD06D07SchedulerMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
