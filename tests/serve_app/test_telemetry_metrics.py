from __future__ import annotations

import time
from dataclasses import replace

import pytest
from prometheus_client import parser
from prometheus_client.core import Metric

from engine_actor.executor import ExecutorInfo, GraphCounters
from engine_actor.request import RequestUsage
from engine_actor.stats import EngineStats, EngineStatsSnapshot, PrefixCounters
from policies.fair_queue import TenantSnapshot
from serve_app.api.responses import Usage
from serve_app.queue_messages import QueueSnapshot
from serve_app.telemetry.engine_collector import EngineMetrics
from serve_app.telemetry.metrics import GatewayMetrics
from serve_app.telemetry.records import Outcome, RequestRecord


def families(metrics: GatewayMetrics) -> dict[str, Metric]:
    return {f.name: f for f in parser.text_string_to_metric_families(metrics.render().decode())}


def value(metrics: GatewayMetrics, sample: str, **labels: str) -> float:
    """Sum of the samples of this name whose labels include the given ones."""
    return sum(
        s.value
        for family in families(metrics).values()
        for s in family.samples
        if s.name == sample and labels.items() <= s.labels.items()
    )


def finished(
    outcome: Outcome = "ok",
    *,
    tenant: str | None = "alpha",
    model: str | None = "tiny",
    status: int = 200,
    code: str | None = None,
    usage: RequestUsage | None = None,
    tokens_at_ms: tuple[float, ...] = (),
) -> RequestRecord:
    record = RequestRecord(request="r", route="/v1/chat/completions", tenant=tenant, model=model)
    for at in tokens_at_ms:
        record.token_sent(at)
    if usage is not None:
        record.usage = usage
    record.finish(outcome, status, code)
    return record


def engine_snapshot(engine: str = "engine-0", running: int = 0, epoch: int = 1) -> EngineStatsSnapshot:
    stats = EngineStats(engine, epoch, "tiny")
    stats.observe_step(
        now=10.0,
        iteration_seconds=0.25,
        scheduler_seconds=0.001,
        model_seconds=0.2,
        prefill_chunks=(64, 16),
        decode_requests=17,
        recomputed_chunks=3,
        preemptions=1,
    )
    stats.observe_input(cached_tokens=25, computed_tokens=75)
    stats.set_state(
        running=running,
        waiting=4,
        free_pages=90,
        evictable_pages=9,
        total_pages=100,
        reclaimed_pages=7,
        nonfinite_requests=2,
        graphs=GraphCounters(captured=7, capture_seconds=3.5, replays=40, eager_steps=2),
    )
    stats.info = ExecutorInfo(
        "torch", "reference", "cuda", "bfloat16", "none", 1, "import flashinfer: no module"
    )
    return stats.snapshot(now=12.0)


NAMES = {
    "scheduler_iteration_latency_seconds": "histogram",
    "prefill_chunk_size_tokens": "histogram",
    "decode_batch_size_requests": "histogram",
    "kv_cache_page_free_pages": "gauge",
    "prefix_cache_hit_rate": "gauge",
    "chunked_prefill_recompute_count": "unknown",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "engine_live_requests": "gauge",
    "engine_asyncio_tasks": "gauge",
    "gateway_live_requests": "gauge",
    "gateway_asyncio_tasks": "gauge",
    "queue_wait_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "served_tokens": "counter",
    "requests": "counter",
    "admission_refusals": "counter",
    "requests_cancelled": "counter",
    "graph_capture_seconds": "gauge",
    "graph_steps": "counter",
    "engine_info": "gauge",
}


def test_every_name_is_exposed_from_the_first_scrape_on() -> None:
    metrics = GatewayMetrics(["tiny"])
    empty = {name: family.type for name, family in families(metrics).items()}
    assert NAMES.items() <= empty.items()
    metrics.engines.update(engine_snapshot())
    metrics.observe(finished(tokens_at_ms=(10, 20)))
    full = {name: family.type for name, family in families(metrics).items()}
    assert NAMES.items() <= full.items()


def test_engine_snapshot_is_rendered_with_exact_names() -> None:
    metrics = GatewayMetrics(["tiny"])
    metrics.engines.update(engine_snapshot(running=2))
    labels = {"engine": "engine-0", "model": "tiny"}
    text = metrics.render().decode()
    assert 'chunked_prefill_recompute_count{engine="engine-0",model="tiny"} 3.0\n' in text
    assert "chunked_prefill_recompute_count_total" not in text
    assert value(metrics, "scheduler_iteration_latency_seconds_bucket", le="0.2", **labels) == 0
    assert value(metrics, "scheduler_iteration_latency_seconds_bucket", le="0.3", **labels) == 1
    assert value(metrics, "scheduler_iteration_latency_seconds_bucket", le="+Inf", **labels) == 1
    assert value(metrics, "scheduler_iteration_latency_seconds_sum", **labels) == 0.25
    assert value(metrics, "prefill_chunk_size_tokens_count", **labels) == 2
    assert value(metrics, "prefill_chunk_size_tokens_bucket", le="16.0", **labels) == 1
    decode = "decode_batch_size_requests"
    above_16 = value(metrics, f"{decode}_count", **labels) - value(metrics, f"{decode}_bucket", le="16.0")
    assert above_16 == 1
    assert value(metrics, "kv_cache_page_free_pages", **labels) == 90
    assert value(metrics, "prefix_cache_hit_rate", **labels) == 0.25
    assert value(metrics, "num_requests_running", **labels) == 2
    assert value(metrics, "num_requests_waiting", **labels) == 4
    assert value(metrics, "kv_cache_page_reclaimed_pages_total", **labels) == 7
    assert value(metrics, "engine_nonfinite_requests_total", **labels) == 2


def test_graphs_and_what_runs_are_told() -> None:
    metrics = GatewayMetrics(["tiny"])
    metrics.engines.update(engine_snapshot())
    assert value(metrics, "graph_capture_seconds", engine="engine-0", model="tiny") == 3.5
    assert value(metrics, "graph_steps_total", engine="engine-0", model="tiny", mode="replay") == 40
    assert value(metrics, "graph_steps_total", engine="engine-0", model="tiny", mode="eager") == 2
    (info,) = families(metrics)["engine_info"].samples
    assert info.labels["attention_backend"] == "reference"
    assert info.labels["fallback_reason"] == "import flashinfer: no module"


def test_a_tenants_service_and_bookings_are_told() -> None:
    metrics = GatewayMetrics(["tiny"], max_tenants=1)

    def tenant(queued: int, served: float) -> TenantSnapshot:
        return TenantSnapshot(queued=queued, weight=1.0, served=served, booked=3.0, key=0.0)

    snapshot = QueueSnapshot(
        7, ("engine-0",), 5, {"a": tenant(4, 100), "b": tenant(1, 10), "c": tenant(0, 5)}
    )
    metrics.queues.update("tiny", snapshot)
    assert value(metrics, "tenant_service_tokens_total", model="tiny", tenant="a") == 100
    assert value(metrics, "tenant_service_tokens_total", model="tiny", tenant="other") == 15
    assert value(metrics, "fair_queue_queued_requests", model="tiny", tenant="a") == 4
    assert value(metrics, "fair_queue_booked_tokens", model="tiny", tenant="other") == 6
    assert value(metrics, "fair_queue_epoch", model="tiny") == 7
    metrics.queues.update("tiny", None)
    assert not families(metrics)["tenant_service_tokens"].samples, "no series rather than a frozen one"


def test_buckets_are_cumulative() -> None:
    metrics = GatewayMetrics(["tiny"])
    metrics.observe(finished(tokens_at_ms=(10, 20, 70, 5000)))
    (family,) = [f for name, f in families(metrics).items() if name == "inter_token_latency_seconds"]
    buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 3


def test_older_snapshots_do_not_replace_newer_ones() -> None:
    metrics = GatewayMetrics(["tiny"])
    metrics.engines.update(engine_snapshot(running=1, epoch=2))
    metrics.engines.update(engine_snapshot(running=50, epoch=1))
    assert value(metrics, "num_requests_running") == 1


def test_prefix_cache_counters_of_tenants_are_bounded_and_end_with_the_tenant() -> None:
    metrics = GatewayMetrics(["tiny"])
    metrics.observe(finished(tenant="alpha"))
    prefix = {
        "alpha": PrefixCounters(30, 10, 2),
        "gone": PrefixCounters(1, 2, 3),
        "left": PrefixCounters(4, 5, 6),
    }
    metrics.engines.update(replace(engine_snapshot(running=1), prefix=prefix | {"": PrefixCounters(0, 0, 9)}))
    assert value(metrics, "tenant_prefix_cache_hit_tokens_total", tenant="alpha") == 30
    assert value(metrics, "tenant_prefix_cache_miss_tokens_total", tenant="other") == 7
    assert value(metrics, "tenant_prefix_cache_evicted_pages_total", tenant="other") == 9
    assert value(metrics, "tenant_prefix_cache_evicted_pages_total", tenant="") == 9
    metrics.retain_tenants([])
    assert value(metrics, "tenant_prefix_cache_hit_tokens_total", tenant="other") == 35


def test_H01_silent_engine_disappears_instead_of_freezing() -> None:
    now = 100.0
    engines = EngineMetrics(clock=lambda: now)
    engines.update(engine_snapshot(running=106))

    def samples(name: str) -> list[float]:
        return [s.value for family in engines.collect() if family.name == name for s in family.samples]

    now = 105.0
    assert samples("num_requests_running") == [106]
    assert samples("engine_last_iteration_age_seconds") == [pytest.approx(7.0)]
    now = 131.0
    assert samples("num_requests_running") == []


def test_H02_requests_and_tokens_agree_over_all_outcomes() -> None:
    metrics = GatewayMetrics(["tiny"])
    records = [finished(usage=RequestUsage(10, 6, 5)) for _ in range(100)]
    records += [finished("cancelled", status=499, usage=RequestUsage(4, 0, 0)) for _ in range(30)]
    records += [
        finished("cancelled", status=499, usage=RequestUsage(10, 6, 2), tokens_at_ms=(5, 6))
        for _ in range(30)
    ]
    records += [finished("refused", status=429, code="rate_limit_exceeded") for _ in range(20)]
    records += [finished("error", status=503, code="engine_unavailable") for _ in range(10)]
    for record in records:
        metrics.observe(record)
    assert value(metrics, "requests_total") == 190
    assert value(metrics, "requests_total", outcome="cancelled") == 60
    assert value(metrics, "requests_cancelled_total") == 60
    assert value(metrics, "requests_cancelled_total", phase="decode") == 30
    assert value(metrics, "admission_refusals_total", tenant="alpha", reason="rate_limit_exceeded") == 20
    assert value(metrics, "requests_total", code="engine_unavailable") == 10
    assert value(metrics, "served_tokens_total", kind="computed_input") == 100 * 10 + 30 * 4 + 30 * 10
    assert value(metrics, "served_tokens_total", kind="cached_input") == 130 * 6
    assert value(metrics, "served_tokens_total", kind="output") == 100 * 5 + 30 * 2


def test_H04_first_token_counts_requests_that_produced_one() -> None:
    metrics = GatewayMetrics(["tiny"])
    metrics.observe(finished(tokens_at_ms=(2000, 2100, 2200), usage=RequestUsage(10, 0, 3)))
    metrics.observe(finished("cancelled", status=499, tokens_at_ms=(40,), usage=RequestUsage(10, 0, 1)))
    metrics.observe(finished("cancelled", status=499))
    metrics.observe(finished("refused", status=429, code="queue_full"))
    assert value(metrics, "time_to_first_token_seconds_count") == 2
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(2.04)
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "e2e_request_latency_seconds_count") == 1


def test_H04_one_token_answer_has_no_gap() -> None:
    metrics = GatewayMetrics(["tiny"])
    metrics.observe(finished(tokens_at_ms=(30,), usage=RequestUsage(5, 0, 1)))
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 0
    assert value(metrics, "time_per_output_token_seconds_count") == 0


def test_H04_two_sequences_have_gaps_of_their_own() -> None:
    record = RequestRecord(request="r", route="/v1/completions", tenant="alpha", model="tiny", sequences=2)
    for at, sequence in ((100, 0), (101, 1), (150, 0), (152, 1)):
        record.token_sent(at, sequence)
    record.usage = RequestUsage(10, 0, 4)
    record.finish("ok", 200)
    metrics = GatewayMetrics(["tiny"])
    metrics.observe(record)
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.050 + 0.051)
    # One gap a sequence, between the first and the last token of the request.
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.052)


def test_H04_tokens_of_a_lost_run_are_not_counted() -> None:
    record = RequestRecord(request="r", route="/v1/completions", tenant="alpha", model="tiny")
    record.new_attempt(1.0)
    record.token_sent(10.0)
    record.token_sent(15.0)
    record.new_attempt(500.0)
    record.token_sent(600.0)
    record.usage = RequestUsage(10, 0, 1)
    record.finish("ok", 200)
    metrics = GatewayMetrics(["tiny"])
    metrics.observe(record)
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(0.6)
    assert value(metrics, "inter_token_latency_seconds_count") == 0


def test_queue_wait_counts_those_who_left_without_a_grant() -> None:
    metrics = GatewayMetrics(["tiny"])
    granted = finished()
    granted.enqueued_ms, granted.granted_ms = 5.0, 105.0
    timed_out = finished("refused", status=503, code="queue_timeout")
    timed_out.enqueued_ms, timed_out.finished_ms = 10.0, 3010.0
    never = finished("refused", status=401, code="invalid_api_key", tenant=None)
    for record in (granted, timed_out, never):
        metrics.observe(record)
    assert value(metrics, "queue_wait_seconds_count") == 2
    assert value(metrics, "queue_wait_seconds_sum") == pytest.approx(3.1)


def test_H05_junk_from_clients_makes_no_series() -> None:
    metrics = GatewayMetrics(["tiny", "alias"])
    for outcome in ("ok", "refused"):
        for model in ("tiny", "alias", "junk", None):
            metrics.observe(finished(outcome, model=model, code="model_not_found"))  # type: ignore[arg-type]
    before = sum(len(f.samples) for f in families(metrics).values())
    for index in range(5000):
        metrics.observe(finished("refused", status=404, model=f"junk-{index}", code="model_not_found"))
    assert sum(len(f.samples) for f in families(metrics).values()) == before
    assert value(metrics, "requests_total", model="other", outcome="refused") == 5001
    assert value(metrics, "requests_total", model="unknown") == 2


def test_H05_unauthenticated_requests_share_one_tenant() -> None:
    metrics = GatewayMetrics(["tiny"])
    for _ in range(10):
        metrics.observe(finished("refused", status=401, tenant=None, model=None, code="invalid_api_key"))
    assert value(metrics, "requests_total", tenant="unknown", model="unknown") == 10


def test_H05_tenants_are_capped_and_removed_ones_go_away() -> None:
    metrics = GatewayMetrics(["tiny"], max_tenants=20)
    for index in range(1000):
        record = finished(tenant=f"t{index}", tokens_at_ms=(1, 2), usage=RequestUsage(3, 1, 2))
        record.enqueued_ms, record.granted_ms = 0.0, 1.0
        metrics.observe(record)
    labelled = {
        s.labels["tenant"] for f in families(metrics).values() for s in f.samples if "tenant" in s.labels
    }
    assert len(labelled) == 21 and "other" in labelled
    assert value(metrics, "requests_total", tenant="other") == 980
    start = time.perf_counter()
    metrics.render()
    assert time.perf_counter() - start < 1.0

    metrics.retain_tenants(["t0"])
    labelled = {
        s.labels["tenant"] for f in families(metrics).values() for s in f.samples if "tenant" in s.labels
    }
    assert labelled == {"t0", "other"}
    metrics.observe(finished(tenant="fresh"))
    assert value(metrics, "requests_total", tenant="fresh") == 1


def test_H05_error_codes_are_capped() -> None:
    metrics = GatewayMetrics(["tiny"])
    for index in range(500):
        metrics.observe(finished("error", status=500, code=f"code_{index}"))
    codes = {s.labels["code"] for s in families(metrics)["requests"].samples if s.name == "requests_total"}
    assert len(codes) == 65 and "other" in codes


def test_two_registries_do_not_share_state() -> None:
    first, second = GatewayMetrics(["tiny"]), GatewayMetrics(["tiny"])
    first.observe(finished())
    assert value(second, "requests_total") == 0


def test_the_quota_store_shows_what_was_done_without_it() -> None:
    metrics = GatewayMetrics(["tiny"])
    assert "quota_store_available" not in families(metrics)
    metrics.quota.update(False, 7, 3)
    assert value(metrics, "quota_store_available") == 0
    assert value(metrics, "quota_admitted_in_outages_total") == 7
    assert value(metrics, "quota_unconfirmed_endings") == 3


def test_billed_tokens_are_those_of_the_ledger() -> None:
    metrics = GatewayMetrics(["tiny"])
    record = finished(usage=RequestUsage(computed_input=30, cached_input=60, output=9))
    record.billed = Usage(prompt_tokens=30, completion_tokens=9, cached_tokens=20)
    metrics.observe(record)
    for kind, tokens in (("input", 30), ("cached_input", 20), ("output", 9)):
        assert value(metrics, "billed_tokens_total", tenant="alpha", kind=kind) == tokens
