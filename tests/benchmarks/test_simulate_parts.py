"""The parts of the simulator: service gap, traces, cost models, and exact times of small runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulate.build import simulate
from benchmarks.simulate.cost_models import COST_MODELS, CostModel, LinearCost, StepShape
from benchmarks.simulate.requests import PREFIX_BLOCK_TOKENS, Scenario, SimulatedRequest
from benchmarks.simulate.results import meets_targets, results
from benchmarks.simulate.scenarios import SCENARIOS, scenario, spread
from benchmarks.simulate.service_gap import ServiceGapMeter, jain_index
from benchmarks.simulate.simulation import HOP_SECONDS, Run
from benchmarks.simulate.traces import read_trace
from benchmarks.workload import BenchmarkError
from engine_actor.step import SamplingColumns, StepRecord
from policies.fair_queue import QUEUE_POLICIES, QueuePolicy

# One second a step and nothing for its tokens: times can be counted by hand.
SECOND = CostModel(
    name="second",
    step=LinearCost(base=1.0, prefill_token=0, decode_row=0, decode_context=0, prefill_pair=0),
    kv_tokens=4096,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefill_chunk_size=64,
    max_model_len=2048,
)


def run(
    *requests: SimulatedRequest, policy: QueuePolicy = "vtc", horizon_s: float | None = None, **changes: int
) -> Run:
    return simulate(scenario("test", requests, horizon_s), policy, replace(SECOND, **changes))  # type: ignore[arg-type]


# Service gap -------------------------------------------------------------------------------------------------------


def observe(meter: ServiceGapMeter, now: float, a: float, b: float, *waiting: str, emptied: str = "") -> None:
    meter.observe(now, {"a": a, "b": b}, dict.fromkeys(waiting, 1), set(emptied))


def test_gap_is_the_largest_difference_over_any_stretch_of_common_backlog() -> None:
    meter = ServiceGapMeter({"a": 1.0, "b": 1.0})
    observe(meter, 0, 0, 0, "a", "b")
    observe(meter, 1, 30, 0, "a", "b")  # a - b: +30
    observe(meter, 2, 30, 50, "a", "b")  # -20: b has got 50 more than a since second 1
    assert (meter.max, meter.mean) == (50, 40)


def test_gap_of_weighted_tenants_is_per_weight() -> None:
    meter = ServiceGapMeter({"a": 4.0, "b": 1.0})
    observe(meter, 0, 0, 0, "a", "b")
    observe(meter, 1, 400, 90, "a", "b")
    assert meter.max == 10


def test_gap_does_not_count_while_one_of_two_has_nothing_waiting() -> None:
    meter = ServiceGapMeter({"a": 1.0, "b": 1.0})
    observe(meter, 0, 0, 0, "a")
    observe(meter, 1, 1000, 0, "a", "b")
    assert (meter.max, meter.mean) == (0, 0)
    observe(meter, 2, 1010, 0, "a", "b")
    assert meter.max == 10
    # b's queue was empty for a moment: a new stretch begins.
    observe(meter, 3, 2000, 0, "a", "b", emptied="b")
    observe(meter, 4, 2005, 0, "a", "b")
    assert meter.max == 10


def test_batch_work_is_compared_with_batch_work_only() -> None:
    meter = ServiceGapMeter({"a": 1.0, "b": 1.0}, batch={"b"})
    observe(meter, 0, 0, 0, "a", "b")
    observe(meter, 1, 100, 0, "a", "b")
    assert (meter.max, meter.mean) == (0, 0)


def test_jain_index_counts_service_per_second_of_backlog() -> None:
    meter = ServiceGapMeter({"a": 1.0, "b": 1.0})
    observe(meter, 0, 0, 0, "a", "b")
    observe(meter, 1, 10, 10, "a")
    observe(meter, 3, 30, 10, "a")
    assert meter.jain() == pytest.approx(1.0)
    assert jain_index([1, 0, 0, 0]) == pytest.approx(0.25)


# Exact times -------------------------------------------------------------------------------------------------------


def test_times_of_one_request_follow_from_its_steps() -> None:
    # 130 prompt tokens in chunks of 64 take three steps, the last of which gives the first of three tokens.
    result = run(SimulatedRequest(2.0, "a", 130, 3))
    (outcome,) = result.outcomes
    start = 2.0 + HOP_SECONDS
    assert list(outcome.token_times) == pytest.approx([start + 3, start + 4, start + 5])
    assert outcome.completed and outcome.ttft_s == pytest.approx(3 + HOP_SECONDS)
    report = results("vtc", result)
    assert report["total_tokens_per_s"] == pytest.approx(133 / (start + 5), abs=1e-3)
    assert report["tenants"]["a"]["service"] == 130 + 2 * 3


SMALL_POOL = [
    SimulatedRequest(index * 1.7, str(index % 3), 20 + 61 * index % 280, 5 + 29 * index % 70)
    for index in range(20)
]


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_every_request_gets_exactly_its_tokens(policy: QueuePolicy) -> None:
    # The pool is small: requests are preempted, and get their tokens once all the same.
    result = run(*SMALL_POOL, policy=policy, kv_tokens=512)
    assert [len(o.token_times) for o in result.outcomes] == [o.request.output_tokens for o in result.outcomes]
    for engine in result.engines:
        engine.scheduler.cache.check_idle()


def test_runs_are_repeatable_and_preempt() -> None:
    first, second = (results("vtc", run(*SMALL_POOL, kv_tokens=512)) for _ in range(2))
    assert first == second
    assert first["preemptions"] > 0


def test_shared_prefix_blocks_are_found_and_private_prompts_are_not() -> None:
    blocks = SimulatedRequest(0.0, "a", PREFIX_BLOCK_TOKENS, 1, prefix_blocks=(3,))
    later = replace(blocks, arrival_s=100.0)
    assert results("vtc", run(blocks, later))["prefix_hit_rate"] == pytest.approx(0.5, abs=0.02)
    assert results("vtc", run(blocks, replace(later, tenant="b")))["prefix_hit_rate"] == 0.0
    alone = SimulatedRequest(0.0, "a", 512, 1)
    assert results("vtc", run(alone, replace(alone, arrival_s=100.0)))["prefix_hit_rate"] == 0.0


def test_a_client_that_gives_up_costs_no_further_tokens() -> None:
    gone = SimulatedRequest(0.0, "a", 10, 500, cancel_after_s=4.5)
    never_granted = [SimulatedRequest(0.0, "b", 10, 2, cancel_after_s=0.5) for _ in range(8)]
    result = run(gone, *never_granted, max_num_seqs=1)
    assert [outcome.cancelled for outcome in result.outcomes] == [True] * 9
    assert len(result.outcomes[0].token_times) <= 5
    assert results("vtc", result)["completed"] == 0


def test_horizon_ends_a_run_and_an_impossible_request_is_an_error() -> None:
    result = run(SimulatedRequest(0.0, "a", 10, 500), horizon_s=20.5)
    assert (result.seconds, len(result.outcomes[0].token_times)) == (20.5, 20)
    with pytest.raises(ValueError, match=r"request 0 .*does not fit"):
        run(SimulatedRequest(0.0, "a", 5000, 5))


def test_targets_count_over_offered_and_over_admitted() -> None:
    kept = SimulatedRequest(0.0, "a", 10, 3, slo_ttft_s=2.0, slo_tpot_s=1.0, slo_deadline_s=4.0)
    late = replace(kept, arrival_s=100.0, slo_ttft_s=0.5)
    slow = replace(kept, arrival_s=200.0, slo_tpot_s=0.9)
    past = replace(kept, arrival_s=300.0, slo_deadline_s=2.9)
    gone = replace(kept, arrival_s=400.0, cancel_after_s=1.5)
    # Under FCFS, which promises nothing and so refuses nobody.
    result = run(kept, late, slow, past, gone, SimulatedRequest(500.0, "a", 1, 1), policy="fcfs")
    assert [meets_targets(outcome) for outcome in result.outcomes] == [True, False, False, False, False, True]
    report = results("vtc", result)
    assert report["attainment_offered"] == report["attainment_admitted"] == 0.2
    assert report["goodput"] == pytest.approx(2 / result.seconds, abs=1e-4)


def test_two_engines_share_one_queue() -> None:
    requests = [SimulatedRequest(0.0, "a", 16, 10) for _ in range(8)]
    model = replace(SECOND, max_num_seqs=4)
    one, two = (simulate(Scenario("test", tuple(requests)), "vtc", model, engines=n) for n in (1, 2))
    assert all(outcome.completed for outcome in two.outcomes)
    assert one.seconds >= 20 and two.seconds < 13


# Cost models and traces --------------------------------------------------------------------------------------------


def test_step_shape_separates_prefill_from_decode() -> None:
    def int32(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    empty = np.array([], np.float32)
    record = StepRecord(
        epoch=0, step=1, request=int32(0, 1, 2), request_epoch=int32(0, 0, 0), start=int32(100, 32, 7),
        length=int32(1, 16, 1), is_last_chunk=np.array([True, False, True]), token_ids=int32(*range(18)),
        token_indptr=int32(0, 1, 17, 18), page_indices=int32(), page_indptr=int32(0, 0, 0, 0),
        sampling=SamplingColumns(empty, int32(), empty, np.array([], np.uint64), int32()),
    )  # fmt: skip
    assert StepShape.of(record) == StepShape(
        prefill_tokens=16, decode_rows=2, decode_context=107, prefill_pairs=16 * 32 + 16 * 16 // 2
    )


@pytest.mark.parametrize("name", COST_MODELS)
def test_cost_models_have_their_source_and_plausible_speeds(name: str) -> None:
    model = COST_MODELS[name]()
    source = COST_MODELS[name].__doc__ or ""
    assert model.name == name and ("artifact" in source or ".md" in source or "fit" in source)
    decode = model.step.seconds(StepShape(0, 8, 8 * 512, 0))
    prefill = model.step.seconds(StepShape(512, 0, 0, 512 * 256))
    assert 0.001 < decode < 0.5 and 0.001 < prefill < 5.0


def test_traces_in_both_formats(tmp_path: Path) -> None:
    table = tmp_path / "trace.csv"
    table.write_text(
        "arrival_ms,client,input_tokens,output_tokens,slo_ttft_ms\n1500,7,10,20,\n2000,8,1,2,250\n"
    )
    first, second = read_trace(table)
    assert first == SimulatedRequest(1.5, "7", 10, 20)
    assert second == SimulatedRequest(2.0, "8", 1, 2, slo_ttft_s=0.25)
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        json.dumps({"timestamp": 9, "input_length": 513, "output_length": 4, "hash_ids": [0, 5]}) + "\n"
    )
    (request,) = read_trace(lines)
    assert request == SimulatedRequest(0.009, "tenant", 513, 4, prefix_blocks=(0, 5))
    assert request.prompt_token_ids(1) == [*range(512), 5 * 512]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "arrival_ms,input_tokens,output_tokens\n0,1,1\n5,0,1\n", "a.csv:3: input_tokens"),
        ("a.csv", "arrival_ms,input_tokens,output_tokens,colour\n0,1,1,red\n", "a.csv:2: colour"),
        ("a.csv", "arrival_ms,input_tokens,output_tokens\n", "no requests"),
        ("a.jsonl", "{}\n", "a.jsonl:1: "),
        ("a.jsonl", "{\n", "a.jsonl:1: not valid JSON"),
    ],
)
def test_a_wrong_trace_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BenchmarkError, match=message):
        read_trace(tmp_path / name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_are_ordered_and_repeatable(name: str) -> None:
    made = SCENARIOS[name](3)
    arrivals = [request.arrival_s for request in made.requests]
    assert made.name == name and arrivals == sorted(arrivals) and len(arrivals) > 100
    assert made == SCENARIOS[name](3)


def test_spread_follows_zipf() -> None:
    requests = spread([SimulatedRequest(0.0, "x", 1, 1)] * 11_000, 4, seed=0)
    counts = [sum(request.tenant == f"tenant-{index}" for request in requests) for index in range(4)]
    assert counts == pytest.approx([5280, 2640, 1760, 1320], rel=0.1)
