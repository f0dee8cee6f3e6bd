"""Finished records as OpenTelemetry spans: one root per request, children for the phases that happened.

The provider is our own: the process-wide one belongs to Ray Serve. The root span must carry the ids that were
made at arrival, so the provider's id generator hands out those when told to.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from serve_app.telemetry.records import RequestRecord, TraceContext, bounded
from serve_app.telemetry.span_export import QUEUE_REQUESTS, WholeRequests
from serve_app.telemetry.tracing import extract, new_context

logger = logging.getLogger(__name__)

MAX_SPANS = 4
"""Of one request: the root and three children."""

MAX_EVENTS = 128
"""Of one span; the oldest are dropped and counted."""

OPERATIONS = {
    "/v1/chat/completions": ("chat.completions", "chat"),
    "/v1/completions": ("completions", "text_completion"),
}
"""Route -> (span name, gen_ai.operation.name)."""


class PresetIds(IdGenerator):
    """Random ids, save that `preset` decides the next trace and span id."""

    def __init__(self) -> None:
        self.preset: TraceContext | None = None

    def generate_span_id(self) -> int:
        if self.preset is not None:
            span_id, self.preset = self.preset.span_id, None
            return span_id
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        if self.preset is not None:
            return self.preset.trace_id
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


class SpanTracing:
    """Tracing by the OpenTelemetry SDK. Thread-safe; `finish` builds and queues spans, it never waits."""

    def __init__(self, exporter: SpanExporter, sampling_ratio: float, service_name: str) -> None:
        self._exporter = WholeRequests(exporter)
        self._ids = PresetIds()
        self._lock = threading.Lock()
        self._ratio = TraceIdRatioBased(sampling_ratio)
        self._provider = TracerProvider(
            sampler=ParentBased(self._ratio),
            resource=Resource.create({"service.name": service_name}),
            shutdown_on_exit=False,  # its wait has no bound we could set
            id_generator=self._ids,
            span_limits=SpanLimits(max_events=MAX_EVENTS, max_span_attribute_length=256),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=QUEUE_REQUESTS * MAX_SPANS)
        )
        self._tracer = self._provider.get_tracer("evenhand")

    def begin(self, headers: Mapping[str, str]) -> TraceContext:
        """Continue the caller's trace, or begin one."""
        parent = extract(headers)
        if parent is not None:
            return new_context(parent, parent.trace_id, parent.trace_flags.sampled)
        trace_id = secrets.randbits(128) or 1
        sampled = self._ratio.should_sample(None, trace_id, "").decision is Decision.RECORD_AND_SAMPLE
        return new_context(None, trace_id, sampled)

    def finish(self, record: RequestRecord) -> None:
        """Make the spans of a finished record. Call once; does nothing if its trace is not sampled."""
        context = record.trace
        if context is None or not context.sampled or record.finished_ms is None:
            return
        if not self._exporter.admit():
            return
        with self._lock:  # the preset id is for our root alone, and requests do not mix on their way out
            self._make_spans(record, context, record.finished_ms)

    def _make_spans(self, record: RequestRecord, context: TraceContext, finished_ms: float) -> None:
        name, _ = OPERATIONS.get(record.route, ("request", ""))
        self._ids.preset = context
        root = self._tracer.start_span(
            name,
            context=_parent(context),
            kind=SpanKind.SERVER,
            attributes=root_attributes(record),
            start_time=record.started_wall_ns,
        )
        try:
            for event in ("authenticated", "validated", "reserved"):
                at_ms: float | None = getattr(record, f"{event}_ms")
                if at_ms is not None:
                    root.add_event(event, timestamp=_wall(record, at_ms))
            if record.outcome == "error" or (record.status or 0) >= 500:
                root.set_status(Status(StatusCode.ERROR, record.error_code))
            under_root = trace.set_span_in_context(root, Context())
            self._queue_span(record, under_root)
            self._engine_span(record, under_root)
            self._stream_span(record, under_root)
        finally:
            root.end(_wall(record, finished_ms))

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Flush and stop, in `timeout_s` at most; what a dead collector did not take by then is lost."""
        flush = threading.Thread(target=self._provider.shutdown, name="span-flush", daemon=True)
        flush.start()
        flush.join(timeout_s)
        if flush.is_alive():
            logger.warning("spans were not flushed within %.1f s", timeout_s)
            self._exporter.shutdown()

    def _queue_span(self, record: RequestRecord, under: Context) -> None:
        if record.enqueued_ms is None or record.queue_ms is None:
            return
        span = self._tracer.start_span("queue", under, start_time=_wall(record, record.enqueued_ms))
        span.set_attribute("evenhand.granted", record.granted_ms is not None)
        span.end(_wall(record, record.enqueued_ms + record.queue_ms))

    def _engine_span(self, record: RequestRecord, under: Context) -> None:
        """Times are the engine's where it reported them, and the gateway's own where it could not."""
        if record.submitted_ms is None or record.finished_ms is None:
            return
        earliest, latest = _wall(record, record.submitted_ms), _wall(record, record.finished_ms)
        accepted: list[int] = []
        ended: list[int] = []
        events: list[tuple[int, str, dict[str, AttributeValue]]] = []
        for entry in record.engine_timings:
            timings = entry.timings
            if timings.finished_ms is None:
                continue
            start = entry.wall_time_ns - round(timings.finished_ms * 1e6)
            # Clocks of two machines differ: keep the durations, slide them into what we saw ourselves.
            start = max(earliest, min(start, latest - round(timings.finished_ms * 1e6)))
            accepted.append(start)
            ended.append(start + round(timings.finished_ms * 1e6))
            sequence: dict[str, AttributeValue] = {"evenhand.sequence": entry.sequence}
            for offset_ms, tokens in timings.prefill_chunks:
                chunk: dict[str, AttributeValue] = {"evenhand.tokens": tokens, **sequence}
                events.append((start + round(offset_ms * 1e6), "prefill_chunk", chunk))
            if timings.first_token_ms is not None:
                events.append((start + round(timings.first_token_ms * 1e6), "first_token", sequence))
        span = self._tracer.start_span(
            "engine", under, start_time=max(earliest, min(accepted, default=earliest))
        )
        span.set_attributes(
            {
                "evenhand.engine": record.engine or "unknown",
                "evenhand.attempts": record.attempts,
                "evenhand.prefill_chunks": sum(len(e.timings.prefill_chunks) for e in record.engine_timings),
                "evenhand.preemptions": sum(e.timings.preemptions for e in record.engine_timings),
            }
        )
        for at_ns, name, attributes in sorted(events, key=lambda event: event[0]):
            span.add_event(name, attributes, min(at_ns, latest))
        span.end(min(latest, max(ended, default=latest)))

    def _stream_span(self, record: RequestRecord, under: Context) -> None:
        if not record.stream or record.first_token_ms is None or record.finished_ms is None:
            return
        span = self._tracer.start_span("stream", under, start_time=_wall(record, record.first_token_ms))
        span.end(_wall(record, record.finished_ms))


def root_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    """Semantic-convention names where they exist. Identity and counts only: no prompt, no answer, no key."""
    usage = record.usage
    attributes: dict[str, AttributeValue] = {
        "http.request.method": bounded(record.method, 16),
        "http.route": record.route,
        "gen_ai.provider.name": "evenhand",
        "gen_ai.request.stream": record.stream,
        "gen_ai.request.choice.count": record.sequences,
        "gen_ai.usage.input_tokens": usage.computed_input + usage.cached_input,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_input,
        "gen_ai.usage.output_tokens": usage.output,
        "evenhand.request": bounded(record.request),
        "evenhand.outcome": record.outcome or "error",
        "evenhand.attempts": record.attempts,
    }
    _, operation = OPERATIONS.get(record.route, ("", None))
    optional: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": None if record.model is None else bounded(record.model),
        "gen_ai.response.finish_reasons": record.finish_reasons[:16] or None,
        "gen_ai.response.time_to_first_chunk": (
            None if record.first_token_ms is None else record.first_token_ms / 1000.0
        ),
        "http.response.status_code": record.status,
        "error.type": record.error_code,
        "evenhand.tenant": record.tenant,
    }
    attributes.update({name: value for name, value in optional.items() if value is not None})
    return attributes


def _parent(context: TraceContext) -> Context:
    """The caller's span as parent, or an empty context: never whatever span is current in this task."""
    if context.parent_span_id is None:
        return Context()
    parent = SpanContext(
        context.trace_id,
        context.parent_span_id,
        is_remote=True,
        trace_flags=TraceFlags(context.flags),
        trace_state=TraceState.from_header([context.trace_state]) if context.trace_state else None,
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _wall(record: RequestRecord, at_ms: float) -> int:
    return record.started_wall_ns + round(at_ms * 1e6)
