"""Metrics of one gateway process: finished requests by tenant and model, and the engines it hears from.

The number of series is bounded whatever clients send. A tenant label is the name behind an accepted key, at
most `max_tenants` of them; a model label is a served name; everything else falls into "unknown" (not known)
or "other" (not listed).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from engine_actor import stats
from serve_app.telemetry.engine_collector import EngineMetrics, histogram_family
from serve_app.telemetry.queue_collector import QueueMetrics
from serve_app.telemetry.quota_collector import QuotaMetrics
from serve_app.telemetry.records import INTER_TOKEN_BOUNDS_S, RequestRecord

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of what `render` returns."""

MAX_CODES = 64
"""Error codes are a fixed list of ours; this only guards against one that is made from input by mistake."""

FIRST_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

TENANT_MODEL = ("tenant", "model")


class InterTokenLatency(Collector):
    """inter_token_latency_seconds: merges per-request histograms, which the library's own type cannot."""

    def __init__(self) -> None:
        self._by_labels: dict[tuple[str, str], stats.Histogram] = {}

    def add(self, tenant: str, model: str, gaps: stats.Histogram) -> None:
        mine = self._by_labels.setdefault((tenant, model), stats.Histogram(INTER_TOKEN_BOUNDS_S))
        mine.merge(gaps)

    def remove_tenant(self, tenant: str) -> None:
        self._by_labels = {labels: h for labels, h in self._by_labels.items() if labels[0] != tenant}

    def collect(self) -> Iterator[Metric]:
        yield histogram_family(
            "inter_token_latency_seconds",
            "Gap between messages with tokens of one sequence; none for a one-token answer.",
            TENANT_MODEL,
            list(self._by_labels.items()),
        )


class GatewayMetrics:
    """Own registry, no process-wide state. `observe` each finished record once; `render` answers a scrape."""

    def __init__(self, models: Collection[str], max_tenants: int = 200) -> None:
        """`models` are the served names, aliases included."""
        self.engines = EngineMetrics(tenant_label=self._known_tenant)
        self.quota = QuotaMetrics()
        self.queues = QueueMetrics(self._tenant_label)
        self._models = frozenset(models)
        self._max_tenants = max_tenants
        self._tenants: set[str] = set()
        self._codes: set[str] = set()
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "requests",
            "Finished requests. The code is empty for those that went well.",
            (*TENANT_MODEL, "outcome", "code"),
            registry=registry,
        )
        self._refusals = Counter(
            "admission_refusals",
            "Requests turned away before an engine took them.",
            ("tenant", "reason"),
            registry=registry,
        )
        self._cancelled = Counter(
            "requests_cancelled",
            "Requests the client left, by how far they had come.",
            (*TENANT_MODEL, "phase"),
            registry=registry,
        )
        self._tokens = Counter(
            "served_tokens",
            "Tokens by kind: computed_input, cached_input, output. Those of cancelled requests count.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._billed = Counter(
            "billed_tokens",
            "Tokens charged, each prompt once: input (cached included), cached_input, output. As in the ledger.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._deadlines = Counter(
            "deadline_requests",
            "Requests that came with a deadline: all that were offered, by what was promised and whether it was met.",
            (*TENANT_MODEL, "admission", "met"),
            registry=registry,
        )
        self._calibration = Gauge(
            "deadline_calibration_ratio",
            "Share of the admitted requests whose first token came within the time predicted on admission.",
            ("model",),
            registry=registry,
        )
        self._predictions: dict[str, tuple[int, int]] = {}  # by model: within the prediction, in all
        self._queue_wait = Histogram(
            "queue_wait_seconds",
            "Time in the fair queue, until the grant or until the request left without one.",
            TENANT_MODEL,
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self._first_token = Histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token sent, of every request that produced one.",
            TENANT_MODEL,
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._per_token = Histogram(
            "time_per_output_token_seconds",
            "Mean gap after the first token, one value per request with a second token.",
            TENANT_MODEL,
            buckets=INTER_TOKEN_BOUNDS_S,
            registry=registry,
        )
        self._request_time = Histogram(
            "e2e_request_latency_seconds",
            "From arrival to the end, of requests that went well.",
            TENANT_MODEL,
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._live = Gauge(
            "gateway_live_requests", "Requests that have been read and are not settled.", registry=registry
        )
        self._tasks = Gauge("gateway_asyncio_tasks", "Tasks of the gateway's event loop.", registry=registry)
        self._inter_token = InterTokenLatency()
        registry.register(self._inter_token)
        registry.register(self.engines)
        registry.register(self.queues)
        registry.register(self.quota)
        ProcessCollector(registry=registry)

    def observe(self, record: RequestRecord) -> None:
        """Count a finished record. Call once per request."""
        tenant, model, code = self._tenant(record), self._model(record), self._code(record)
        outcome = record.outcome or "error"
        self._requests.labels(tenant, model, outcome, code).inc()
        if outcome == "refused":
            self._refusals.labels(tenant, code).inc()
        elif outcome == "cancelled":
            self._cancelled.labels(tenant, model, record.phase).inc()
        usage = record.usage
        for kind, tokens in (
            ("computed_input", usage.computed_input),
            ("cached_input", usage.cached_input),
            ("output", usage.output),
        ):
            if tokens:
                self._tokens.labels(tenant, kind).inc(tokens)
        if record.billed is not None:
            for kind, tokens in (
                ("input", record.billed.prompt_tokens),
                ("cached_input", record.billed.cached_tokens),
                ("output", record.billed.completion_tokens),
            ):
                if tokens:
                    self._billed.labels(tenant, kind).inc(tokens)
        for histogram, value_ms in (
            (self._queue_wait, record.queue_ms),
            (self._first_token, record.first_token_ms),
            (self._per_token, record.time_per_output_token_ms),
            (self._request_time, record.finished_ms if outcome == "ok" else None),
        ):
            if value_ms is not None:
                histogram.labels(tenant, model).observe(value_ms / 1000.0)
        if record.inter_token.count:
            self._inter_token.add(tenant, model, record.inter_token)
        self._observe_deadline(record, tenant, model)

    def set_work(self, live_requests: int, tasks: int) -> None:
        """What the gateway is busy with now. Both come back to where they were once nobody asks for anything."""
        self._live.set(live_requests)
        self._tasks.set(tasks)

    def _observe_deadline(self, record: RequestRecord, tenant: str, model: str) -> None:
        met = record.deadline_met
        if met is None:
            return
        admission = record.admission or ("refused" if record.outcome == "refused" else "none")
        if record.error_code == "deadline_exceeded":
            admission = "admitted"
        self._deadlines.labels(tenant, model, admission, "true" if met else "false").inc()
        if record.predicted_first_token_ms is not None and record.first_token_ms is not None:
            within, all_of_them = self._predictions.get(model, (0, 0))
            within += record.first_token_ms <= record.predicted_first_token_ms
            self._predictions[model] = (within, all_of_them + 1)
            self._calibration.labels(model).set(within / (all_of_them + 1))

    def retain_tenants(self, existing: Collection[str]) -> None:
        """Drop the series of tenants that exist no more. Their places are free for others then."""
        for tenant in self._tenants.difference(existing):
            self._tenants.discard(tenant)
            self._inter_token.remove_tenant(tenant)
            for metric in (
                self._requests,
                self._refusals,
                self._cancelled,
                self._tokens,
                self._billed,
                self._deadlines,
                self._queue_wait,
                self._first_token,
                self._per_token,
                self._request_time,
            ):
                metric.remove_by_labels({"tenant": tenant})

    def render(self) -> bytes:
        """The text exposition format, of `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _tenant(self, record: RequestRecord) -> str:
        return "unknown" if record.tenant is None else self._tenant_label(record.tenant)

    def _known_tenant(self, tenant: str) -> str:
        """For counters of engines, which remember tenants that exist no more."""
        return tenant if tenant in self._tenants else "other"

    def _tenant_label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= self._max_tenants:
                return "other"
            self._tenants.add(tenant)
        return tenant

    def _model(self, record: RequestRecord) -> str:
        if record.model is None:
            return "unknown"
        return record.model if record.model in self._models else "other"

    def _code(self, record: RequestRecord) -> str:
        code = record.error_code or ""
        if code and code not in self._codes:
            if len(self._codes) >= MAX_CODES:
                return "other"
            self._codes.add(code)
        return code
