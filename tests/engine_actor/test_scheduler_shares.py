"""Slots and pages among tenants: reclaim, waiting order, admission by the estimated peak, shared prefixes."""

from __future__ import annotations

import dataclasses
import random

import pytest
from scheduler_harness import PageReadingRunner, check_accounts, drain, expected, make, request, step

from engine_actor.executor import PAGE_SIZE
from engine_actor.scheduler import Scheduler


def run_steps(scheduler: Scheduler, runner: PageReadingRunner, count: int) -> dict[str, list[int]]:
    """Step `count` times; the tokens of every request."""
    answers: dict[str, list[int]] = {}
    for _ in range(count):
        for row in step(scheduler, runner)[1]:
            answers.setdefault(row.request, []).extend(row.token_ids)
        check_accounts(scheduler)
    return answers


def running(scheduler: Scheduler) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sequence in scheduler.running:
        counts[sequence.tenant.name] = counts.get(sequence.tenant.name, 0) + 1
    return counts


def test_c04_a_tenant_under_its_share_has_a_token_within_two_steps_though_every_slot_is_taken() -> None:
    scheduler, runner = make(max_num_seqs=8)
    for i in range(30):
        scheduler.submit(request(f"a{i}", [i + 1] * 20, 300, tenant="a"), 0.0)
    run_steps(scheduler, runner, 20)
    assert running(scheduler) == {"a": 8}
    for i in range(6):
        scheduler.submit(request(f"b{i}", [40 + i] * 5, 300, tenant="b"), 0.0)
    first = run_steps(scheduler, runner, 2)
    assert running(scheduler) == {"a": 4, "b": 4}
    assert {"b0", "b1", "b2", "b3"} <= set(first)
    assert scheduler.preemptions == 4
    run_steps(scheduler, runner, 100)
    assert scheduler.preemptions == 4, "both are at their share: nothing more is taken"
    assert running(scheduler) == {"a": 4, "b": 4}


def test_what_a_tenant_leaves_unused_is_lent_and_comes_back_by_weight() -> None:
    scheduler, runner = make(max_num_seqs=8)
    for i in range(10):
        scheduler.submit(request(f"a{i}", [i + 1] * 4, 100, tenant="a", weight=1.0), 0.0)
        scheduler.submit(request(f"b{i}", [i + 20] * 4, 20, tenant="b", weight=3.0), 0.0)
    run_steps(scheduler, runner, 10)
    assert running(scheduler) == {"a": 2, "b": 6}
    run_steps(scheduler, runner, 40)
    assert running(scheduler) == {"a": 8}, "b has ended"
    assert scheduler.preemptions == 0


def test_a_returning_tenant_over_and_over_costs_one_preemption_each_time_and_starves_nobody() -> None:
    scheduler, runner = make(max_num_seqs=4)
    prompts = {f"a{i}": [i + 1] * 20 for i in range(12)}
    for name, prompt in prompts.items():
        scheduler.submit(request(name, prompt, 60, tenant="a"), 0.0)
    answers: dict[str, list[int]] = {}
    visits = 0
    while scheduler.state.live_sequences().get("a"):
        name = f"b{visits}"
        prompts[name] = [visits % 50, 3, 4]
        scheduler.submit(request(name, prompts[name], 4, tenant="b"), 0.0)
        visits += 1
        for _ in range(8):
            for row in step(scheduler, runner)[1]:
                answers.setdefault(row.request, []).extend(row.token_ids)
            check_accounts(scheduler)
    assert scheduler.preemptions <= visits
    for name, tokens in drain(scheduler, runner).items():
        answers.setdefault(name, []).extend(tokens)
    assert answers == {
        name: expected(prompt, 60 if name[0] == "a" else 4) for name, prompt in prompts.items()
    }


def test_pages_are_reclaimed_for_a_tenant_under_its_share_and_charged_once() -> None:
    scheduler, runner = make(num_pages=25, max_num_seqs=16)
    for i in range(8):
        scheduler.submit(request(f"a{i}", [i + 1] * 40, 60, tenant="a", predicted=1), 0.0)
    run_steps(scheduler, runner, 20)
    before = scheduler.state.tenant_pages()["a"]
    assert before > 20
    scheduler.submit(request("b", [9] * 60, 4, tenant="b", predicted=4), 0.0)
    run_steps(scheduler, runner, 1)
    assert running(scheduler)["b"] == 1
    answers = drain(scheduler, runner)
    assert scheduler.preemptions > 0
    assert len(answers["b"]) == 4
    assert scheduler.served == {"a": 8 * (40 + 2 * 60), "b": 60 + 2 * 4}, "computed again, charged once"


def test_c04_tenants_take_turns_however_many_requests_one_sends_first() -> None:
    scheduler, runner = make(max_num_seqs=2)
    for i in range(20):
        scheduler.submit(request(f"a{i}", [i + 1] * 4, 10, tenant="a"), 0.0)
    for i in range(4):
        scheduler.submit(request(f"b{i}", [i + 30] * 4, 10, tenant="b"), 0.0)
    finished: list[str] = []
    while scheduler.has_work:
        finished += [row.request for row in step(scheduler, runner)[1] if row.finish_reason]
    assert [name[0] for name in finished[:8]].count("b") == 4
    order = [int(name[1:]) for name in finished if name[0] == "a"]
    assert all(abs(place - number) <= 1 for place, number in enumerate(order)), (
        "inside a tenant, as they came"
    )


def test_c04_no_stream_misses_a_step_while_a_long_prompt_is_computed() -> None:
    scheduler, runner = make(
        num_pages=300,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        prefill_chunk_size=64,
        max_model_len=2000,
    )
    streams = {f"s{i}" for i in range(8)}
    for name in sorted(streams):
        scheduler.submit(request(name, [int(name[1]) + 1] * 4, 200, tenant="a"), 0.0)
    run_steps(scheduler, runner, 3)
    scheduler.submit(request("long", list(range(50)) * 30, 2, tenant="b"), 0.0)
    steps = 0
    while True:
        record, rows = step(scheduler, runner)
        steps += 1
        assert record is not None and record.num_tokens <= 64
        assert {row.request for row in rows} >= streams, "one token of each stream in every step"
        if any(row.request == "long" for row in rows):
            break
    assert steps == -(-1500 // (64 - 8)), "and the prompt gets all that is left"


def test_a_head_that_fits_no_room_of_its_tenant_does_not_hold_up_the_others() -> None:
    scheduler, runner = make(num_pages=25, max_num_seqs=16)
    scheduler.submit(request("a0", [1] * 100, 40, tenant="a", predicted=40), 0.0)
    scheduler.submit(
        request("a1", [2] * 200, 40, tenant="a", predicted=40), 0.0
    )  # above the half of 24 pages
    for i in range(3):
        scheduler.submit(request(f"b{i}", [i + 3] * 20, 30, tenant="b", predicted=30), 0.0)
    run_steps(scheduler, runner, 3)
    assert running(scheduler) == {"a": 1, "b": 3}
    assert set(drain(scheduler, runner)) == {"a0", "a1", "b0", "b1", "b2"}


def test_admission_looks_at_the_peak_and_not_at_the_present() -> None:
    """24 usable pages. Two requests of 1 + 9 pages fit side by side; of three, one has to wait."""
    scheduler, runner = make(num_pages=25, max_num_seqs=16, kv_watermark=0.0)
    for i in range(3):
        scheduler.submit(request(f"r{i}", [i + 1] * 10, 150, predicted=150), 0.0)
    run_steps(scheduler, runner, 3)
    assert scheduler.num_running == 2
    drain(scheduler, runner)
    assert scheduler.preemptions == 0


def test_admission_counts_on_the_pages_that_shorter_requests_give_back() -> None:
    """Two short requests end long before the long one needs what they hold: all three may start."""
    scheduler, runner = make(num_pages=25, max_num_seqs=16, kv_watermark=0.0)
    scheduler.submit(request("long", [1] * 10, 300, predicted=300), 0.0)
    for i in range(2):
        scheduler.submit(request(f"short{i}", [i + 2] * 60, 4, predicted=4), 0.0)
    run_steps(scheduler, runner, 1)
    assert scheduler.num_running == 3, "at their ends the sum would be 19 + 2 * 4 pages, the peak is 19"
    drain(scheduler, runner)
    assert scheduler.preemptions == 0


def test_the_utilization_limit_and_the_watermark_bound_admission_but_never_a_lone_request() -> None:
    scheduler, runner = make(num_pages=101, max_num_seqs=16, kv_cache_utilization_limit=0.5)
    for i in range(8):
        scheduler.submit(request(f"r{i}", [i + 1] * 160, 2, predicted=2), 0.0)
    run_steps(scheduler, runner, 1)
    assert scheduler.num_running == 4, "4 * 11 pages are below 50"
    drain(scheduler, runner)
    scheduler, runner = make(num_pages=101, max_num_seqs=16, kv_watermark=0.3)
    for i in range(8):
        scheduler.submit(request(f"r{i}", [i + 1] * 160, 2, predicted=2), 0.0)
    run_steps(scheduler, runner, 1)
    assert scheduler.num_running == 6, "a seventh would leave 23 pages of the 30"
    drain(scheduler, runner)
    scheduler, runner = make(num_pages=11, kv_cache_utilization_limit=0.1, kv_watermark=0.9)
    scheduler.submit(request("alone", [1] * 100, 30), 0.0)
    assert drain(scheduler, runner)["alone"] == expected([1] * 100, 30)


def test_a_request_above_its_prediction_still_ends() -> None:
    scheduler, runner = make(num_pages=12, max_num_seqs=8)
    for i in range(6):
        scheduler.submit(request(f"r{i}", [i + 1] * 10, 140, predicted=1), 0.0)
    answers = drain(scheduler, runner)
    assert answers == {f"r{i}": expected([i + 1] * 10, 140) for i in range(6)}
    assert scheduler.preemptions > 0


@pytest.mark.parametrize("chunk", [7, 16, 32, 512])
def test_equal_prompts_that_arrive_together_compute_their_prefix_once(chunk: int) -> None:
    scheduler, runner = make(max_num_batched_tokens=512, prefill_chunk_size=chunk)
    prefix = list(range(40)) * 3
    for i in range(8):
        scheduler.submit(request(f"r{i}", [*prefix, i], 4), 0.0)
    computed = 0
    answers: dict[str, list[int]] = {}
    while scheduler.has_work:
        record, rows = step(scheduler, runner)
        check_accounts(scheduler)
        assert record is not None
        computed += sum(record.chunk_lengths)
        for row in rows:
            answers.setdefault(row.request, []).extend(row.token_ids)
    assert answers == {f"r{i}": expected([*prefix, i], 4) for i in range(8)}
    whole_pages = len(prefix) // PAGE_SIZE * PAGE_SIZE
    assert computed == 8 * (len(prefix) + 1) - 7 * whole_pages
    assert scheduler.service.prefix["a"].hit_tokens == 7 * whole_pages
    assert scheduler.served["a"] == pytest.approx(computed + 0.1 * 7 * whole_pages + 2 * 8 * 4)


def test_d01_equal_prompts_of_two_tenants_share_nothing() -> None:
    scheduler, runner = make(max_num_batched_tokens=512, prefill_chunk_size=512)
    for tenant in "ab":
        scheduler.submit(request(tenant, [5] * 100, 4, tenant=tenant), 0.0)
    record, _ = step(scheduler, runner)
    assert record is not None and record.length.tolist() == [100, 100]
    drain(scheduler, runner)
    assert scheduler.service.cached_tokens == 0


def test_tenants_of_one_namespace_share_and_counters_go_to_whom_they_belong() -> None:
    scheduler, runner = make(num_pages=30)
    for tenant in "ab":
        shared = dataclasses.replace(request(tenant, [5] * 100, 2, tenant=tenant), namespace="both")
        scheduler.submit(shared, 0.0)
        drain(scheduler, runner)
    own = {name: (c.hit_tokens, c.miss_tokens) for name, c in scheduler.state.prefix_counters().items()}
    assert own == {"a": (0, 100), "b": (96, 4)}
    scheduler.submit(request("c", [6] * 400, 2, tenant="c"), 0.0)
    drain(scheduler, runner)
    assert scheduler.state.prefix_counters()[""].evicted_pages == 3, "29 pages, 26 of them for c"


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_computes_again_only_what_was_taken(caching: bool) -> None:
    scheduler, runner = make(max_num_seqs=2, prefix_caching=caching)
    for name in ("a0", "a1"):
        scheduler.submit(request(name, [1, int(name[1])] * 100, 50, tenant="a"), 0.0)
    run_steps(scheduler, runner, 30)
    scheduler.submit(request("b", [3] * 5, 5, tenant="b"), 0.0)
    run_steps(scheduler, runner, 1)
    assert running(scheduler) == {"a": 1, "b": 1}
    again = 0
    answers: dict[str, list[int]] = {}
    while scheduler.has_work:
        record, rows = step(scheduler, runner)
        again += sum(record.chunk_lengths) if record else 0
        for row in rows:
            answers.setdefault(row.request, []).extend(row.token_ids)
    assert scheduler.preemptions == 1
    assert again <= 5 + PAGE_SIZE, "nobody needed its pages meanwhile: only the open one is computed again"
    assert len(answers["b"]) == 5 - 1
    scheduler.cache.check_idle()
    if not caching:
        assert scheduler.cache.free == scheduler.cache.total, "nothing is kept for others"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("caching", [True, False])
def test_every_request_ends_whoever_comes_and_goes(seed: int, caching: bool) -> None:
    """Four tenants of unequal weight, slots and pages short, wrong predictions: always progress, exact answers."""
    rng = random.Random(seed)
    scheduler, runner = make(
        num_pages=rng.choice([9, 14, 30]),
        max_num_seqs=rng.choice([1, 2, 4, 6]),
        max_num_batched_tokens=rng.choice([3, 24, 64]),
        prefill_chunk_size=rng.choice([1, 13, 64]),
        prefix_caching=caching,
        max_model_len=120,
    )
    weights = {"a": 1.0, "b": 0.25, "c": 5.0, "d": 1.0}
    prompts: dict[str, tuple[list[int], int]] = {}
    answers: dict[str, list[int]] = {}
    idle = 0
    while len(prompts) < 40 or scheduler.has_work:
        if len(prompts) < 40 and rng.random() < 0.3:
            for _ in range(rng.choice([1, 1, 4])):
                tenant = rng.choice("aaabcd")
                name = f"{tenant}{len(prompts)}"
                prompt = [rng.randint(0, 2)] * rng.choice([1, 16, 40, 80]) + [9] * rng.randint(1, 9)
                prompts[name] = prompt, min(rng.choice([1, 10, 30]), 120 - len(prompt))
                scheduler.submit(
                    request(
                        name,
                        prompt,
                        prompts[name][1],
                        tenant=tenant,
                        weight=weights[tenant],
                        predicted=rng.choice([1, 10, 100]),
                    ),
                    0.0,
                )
        record, rows = step(scheduler, runner)
        check_accounts(scheduler)
        idle = 0 if record is not None or rows or not scheduler.has_work else idle + 1
        assert idle < 2, "work waits and nothing moves"
        for row in rows:
            answers.setdefault(row.request, []).extend(row.token_ids)
    scheduler.cache.check_idle()
    for name, (prompt, count) in prompts.items():
        assert answers[name] == expected(prompt, count)


def test_a_cap_on_pages_binds_while_another_tenant_waits_and_not_before() -> None:
    scheduler, runner = make(num_pages=41, max_num_seqs=16)
    for i in range(12):
        scheduler.submit(request(f"a{i}", [i + 1] * 40, 50, tenant="a", kv_share=0.25, predicted=50), 0.0)
    run_steps(scheduler, runner, 45)
    assert scheduler.state.tenant_pages()["a"] > 30, "nobody else is there: it borrows"
    for i in range(12):
        scheduler.submit(request(f"b{i}", [i + 20] * 40, 50, tenant="b", predicted=50), 0.0)
    held: list[int] = []
    while scheduler._live.tenants.get("b") and scheduler._live.tenants["b"].waiting:
        run_steps(scheduler, runner, 1)
        held.append(scheduler.state.tenant_pages().get("a", 0))
    # Requests are started within the cap of 10 pages; what they grow by is taken back only when b lacks it.
    assert max(held) <= 12
    assert scheduler.preemptions > 0
    answers = drain(scheduler, runner)
    assert scheduler.served == {"a": 12 * (40 + 2 * 50), "b": 12 * (40 + 2 * 50)}
    assert answers


def equal_requests(count: int, predicted: int) -> tuple[Scheduler, int]:
    """Requests of 64 tokens in and 64 out, run to their ends with pages for 15 at full length; how many steps."""
    scheduler, runner = make(
        num_pages=121, max_num_seqs=64, max_num_batched_tokens=512, prefill_chunk_size=512
    )
    for i in range(count):
        scheduler.submit(request(f"a{i}", [i % 50, i // 50] * 32, 64, predicted=predicted), 0.0)
    steps = 0
    while scheduler.has_work:
        step(scheduler, runner)
        steps += 1
    return scheduler, steps


def test_requests_of_equal_length_do_not_stay_in_step_when_memory_is_short() -> None:
    scheduler, steps = equal_requests(600, predicted=64)
    # Fifteen at a time, all beginning and ending together, would be 14.9 rows a step.
    assert 600 * 64 / steps > 15.4
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("predicted", [1, 8, 500])
def test_wrong_predictions_hold_up_nobody_for_ever(predicted: int) -> None:
    _, steps = equal_requests(100, predicted)
    assert steps < 1000


def test_two_capped_tenants_share_what_no_cap_may_use() -> None:
    scheduler, runner = make(num_pages=41, max_num_seqs=16)
    for i in range(8):
        for tenant in "ab":
            scheduler.submit(
                request(f"{tenant}{i}", [i + 1] * 20, 40, tenant=tenant, kv_share=0.1, predicted=40), 0.0
            )
    run_steps(scheduler, runner, 30)
    pages = scheduler.state.tenant_pages()
    assert pages["a"] + pages["b"] >= 24 and abs(pages["a"] - pages["b"]) <= 4
    drain(scheduler, runner)


def test_a_request_larger_than_its_tenants_cap_runs_alone_among_its_own() -> None:
    scheduler, runner = make(num_pages=41, max_num_seqs=16)
    for i in range(3):
        scheduler.submit(request(f"a{i}", [i + 1] * 300, 4, tenant="a", kv_share=0.1, predicted=4), 0.0)
        scheduler.submit(request(f"b{i}", [i + 9] * 100, 40, tenant="b", predicted=40), 0.0)
    most = 0
    while scheduler.has_work:
        step(scheduler, runner)
        others_wait = bool(scheduler._live.tenants.get("b") and scheduler._live.tenants["b"].waiting)
        most = max(most, running(scheduler).get("a", 0) if others_wait else 0)
    assert most == 1
    assert scheduler.served == {"a": 3 * (300 + 2 * 4), "b": 3 * (100 + 2 * 40)}
