"""Engine statistics as Prometheus metric families: the newest snapshot of each engine, at scrape time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.metrics_core import UnknownMetricFamily
from prometheus_client.registry import Collector

from engine_actor.stats import EngineStatsSnapshot, Histogram, HistogramSnapshot, PrefixCounters

STALE_AFTER_S = 30.0
"""An engine that sent no snapshot for so long is not shown: better no series than a frozen one."""

LABELS = ("engine", "model")

HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStatsSnapshot], HistogramSnapshot]]] = {
    "scheduler_iteration_latency_seconds": (
        "Duration of one engine iteration, scheduling included.",
        lambda s: s.iteration_seconds,
    ),
    "prefill_chunk_size_tokens": (
        "Tokens of each prompt chunk computed in one iteration.",
        lambda s: s.prefill_chunk_tokens,
    ),
    "decode_batch_size_requests": (
        "Sequences that decoded in one iteration, of those with any.",
        lambda s: s.decode_batch_requests,
    ),
}

GAUGES: dict[str, tuple[str, Callable[[EngineStatsSnapshot], float]]] = {
    "kv_cache_page_free_pages": ("KV pages that hold nothing.", lambda s: s.free_pages),
    "kv_cache_page_evictable_pages": (
        "KV pages of cached prefixes nobody uses.",
        lambda s: s.evictable_pages,
    ),
    "kv_cache_page_total_pages": ("KV pages in the pool.", lambda s: s.total_pages),
    "prefix_cache_hit_rate": (
        "Share of input tokens found in the prefix cache since the engine started.",
        lambda s: s.prefix_cache_hit_rate,
    ),
    "num_requests_running": ("Sequences in the running set of the engine.", lambda s: s.running),
    "num_requests_waiting": ("Sequences the engine holds that are not running.", lambda s: s.waiting),
    "engine_live_requests": ("Sequences a gateway has not had the last row of.", lambda s: s.live_requests),
    "engine_asyncio_tasks": ("Tasks of the engine's event loop.", lambda s: s.tasks),
}

COUNTERS: dict[str, tuple[str, Callable[[EngineStatsSnapshot], float]]] = {
    "prefix_cache_hit_tokens": ("Input tokens found in the prefix cache.", lambda s: s.cached_input_tokens),
    "prefix_cache_miss_tokens": ("Input tokens that had to be computed.", lambda s: s.computed_input_tokens),
    "kv_cache_page_reclaimed_pages": (
        "KV pages taken back from cached prefixes.",
        lambda s: s.reclaimed_pages,
    ),
    "engine_preemptions": ("Sequences put back to be computed again later.", lambda s: s.preemptions),
    "engine_nonfinite_requests": (
        "Requests ended because the model returned logits that are not finite.",
        lambda s: s.nonfinite_requests,
    ),
    "engine_iterations": ("Engine iterations.", lambda s: s.steps),
    "engine_scheduler_seconds": ("Time spent scheduling.", lambda s: s.scheduler_seconds),
    "engine_model_seconds": ("Time spent in the executor and sampler.", lambda s: s.model_seconds),
}
"""The exposition appends _total."""


PREFIX_COUNTERS: dict[str, tuple[str, Callable[[PrefixCounters], float]]] = {
    "tenant_prefix_cache_hit_tokens": (
        "Input tokens of a tenant found in the prefix cache.",
        lambda counters: counters.hit_tokens,
    ),
    "tenant_prefix_cache_miss_tokens": (
        "Input tokens of a tenant that had to be computed.",
        lambda counters: counters.miss_tokens,
    ),
    "tenant_prefix_cache_evicted_pages": (
        "KV pages of a tenant's cached prefixes given up. Those that several tenants share go under no tenant.",
        lambda counters: counters.evicted_pages,
    ),
}


@dataclass(frozen=True)
class _Received:
    snapshot: EngineStatsSnapshot
    at: float


class EngineMetrics(Collector):
    """Keeps the newest snapshot per engine. Register it with a CollectorRegistry."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, tenant_label: Callable[[str], str] = str
    ) -> None:
        """`clock` gives monotonic seconds. `tenant_label` bounds the number of series: the label of a tenant."""
        self._clock = clock
        self._tenant_label = tenant_label
        self._received: dict[str, _Received] = {}

    def update(self, snapshot: EngineStatsSnapshot) -> None:
        """Take a snapshot; one of an older epoch than known, or out of order, is ignored."""
        known = self._received.get(snapshot.engine)
        if known is not None:
            before = known.snapshot
            if (snapshot.engine_epoch, snapshot.steps) < (before.engine_epoch, before.steps):
                return
        self._received[snapshot.engine] = _Received(snapshot, self._clock())

    def remove(self, engine: str) -> None:
        """Forget an engine that is gone."""
        self._received.pop(engine, None)

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        for engine, received in list(self._received.items()):
            if now - received.at > STALE_AFTER_S:
                self.remove(engine)
        live = list(self._received.values())
        rows = [((r.snapshot.engine, r.snapshot.model), r.snapshot) for r in live]
        for name, (help_text, histogram) in HISTOGRAMS.items():
            yield histogram_family(name, help_text, LABELS, [(labels, histogram(s)) for labels, s in rows])
        for name, (help_text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            for labels, snapshot in rows:
                gauge.add_metric(labels, value(snapshot))
            yield gauge
        for name, (help_text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            for labels, snapshot in rows:
                counter.add_metric(labels, value(snapshot))
            yield counter
        # A counter family would be named ..._count_total. Untyped keeps the name and makes no false claim.
        recomputed = UnknownMetricFamily(
            "chunked_prefill_recompute_count",
            "Prefill chunks computed again after preemption, lost pages or a failed hand-over. Only goes up.",
            labels=LABELS,
        )
        age = GaugeMetricFamily(
            "engine_last_iteration_age_seconds", "Time since the last iteration ended.", labels=LABELS
        )
        for received, (labels, snapshot) in zip(live, rows, strict=True):
            recomputed.add_metric(labels, snapshot.recomputed_chunks)
            if snapshot.last_step_age_s is not None:
                age.add_metric(labels, snapshot.last_step_age_s + now - received.at)
        yield recomputed
        yield age
        yield _info_family(rows)
        yield from _graph_families(rows)
        yield from self._prefix_families(rows)

    def _prefix_families(
        self, rows: list[tuple[tuple[str, str], EngineStatsSnapshot]]
    ) -> Iterator[CounterMetricFamily]:
        for name, (help_text, value) in PREFIX_COUNTERS.items():
            family = CounterMetricFamily(name, help_text, labels=(*LABELS, "tenant"))
            for labels, snapshot in rows:
                totals: dict[str, float] = {}
                for tenant, counters in snapshot.prefix.items():
                    label = self._tenant_label(tenant) if tenant else ""
                    totals[label] = totals.get(label, 0.0) + value(counters)
                for label, total in totals.items():
                    family.add_metric((*labels, label), total)
            yield family


def _info_family(rows: list[tuple[tuple[str, str], EngineStatsSnapshot]]) -> Metric:
    """What runs, and why it is not something faster."""
    names = ("executor", "attention_backend", "device", "dtype", "quantization", "fallback_reason")
    family = GaugeMetricFamily("engine_info", "What the engine runs; always 1.", labels=(*LABELS, *names))
    for labels, snapshot in rows:
        if snapshot.info is not None:
            family.add_metric((*labels, *(getattr(snapshot.info, name) or "" for name in names)), 1)
    return family


def _graph_families(rows: list[tuple[tuple[str, str], EngineStatsSnapshot]]) -> Iterator[Metric]:
    """Of the engines that replay captured graphs; an engine without them has no series."""
    capture = GaugeMetricFamily(
        "graph_capture_seconds", "Time that the engine took to capture its decode graphs.", labels=LABELS
    )
    captured = GaugeMetricFamily("graph_captured_graphs", "Decode graphs captured.", labels=LABELS)
    steps = CounterMetricFamily(
        "graph_steps",
        "Engine iterations by graph replay, or eager for want of one.",
        labels=(*LABELS, "mode"),
    )
    for labels, snapshot in rows:
        if (graphs := snapshot.graphs) is not None:
            capture.add_metric(labels, graphs.capture_seconds)
            captured.add_metric(labels, graphs.captured)
            steps.add_metric((*labels, "replay"), graphs.replays)
            steps.add_metric((*labels, "eager"), graphs.eager_steps)
    yield capture
    yield captured
    yield steps


def histogram_family(
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], Histogram | HistogramSnapshot]],
) -> HistogramMetricFamily:
    """Plain histograms, one per label values, as one family with cumulative buckets."""
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for values, histogram in rows:
        buckets: list[tuple[str, float]] = []
        cumulative = 0
        for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
            cumulative += count
            buckets.append((str(float(bound)), cumulative))
        buckets.append(("+Inf", cumulative + histogram.counts[-1]))
        family.add_metric(values, buckets, histogram.sum)
    return family
