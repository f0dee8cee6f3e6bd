"""Trace context of a request, and the tracer that turns finished records into spans.

Propagation is W3C Trace Context. The ids of the root span are made at arrival, because the response and the
calls downstream name them, but every span is made after the request ended: a request that is forgotten
halfway leaves no open span behind, and the serving path pays for two random numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.telemetry.records import RequestRecord, TraceContext

MAX_HEADER = 512
"""Longer trace headers are ignored: the limit of the W3C recommendation for tracestate."""

RANDOM_FLAG = 0x02
"""Trace flag of W3C Trace Context level 2: the trace id is random."""

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True)
class TracingConfig:
    """Where spans go.

    `endpoint` is the full URL of an OTLP/HTTP collector ("http://collector:4318/v1/traces"); None leaves it
    to the OTEL_EXPORTER_OTLP_* variables. `path` is the file of the file exporter. `sampling_ratio` applies
    to traces that begin here; a caller's decision is always kept.
    """

    exporter: Literal["none", "otlp", "file"] = "none"
    endpoint: str | None = None
    path: Path | None = None
    sampling_ratio: float = 1.0
    service_name: str = "evenhand-gateway"


class Tracing(Protocol):
    """What the gateway does with traces: `begin` at arrival, `finish` once after the end."""

    def begin(self, headers: Mapping[str, str]) -> TraceContext | None: ...

    def finish(self, record: RequestRecord) -> None: ...

    def shutdown(self, timeout_s: float = 5.0) -> None: ...


class NoTracing:
    """Records nothing and makes nothing of the SDK. A caller's context passes through untouched."""

    def begin(self, headers: Mapping[str, str]) -> TraceContext | None:
        parent = extract(headers)
        if parent is None:
            return None
        return TraceContext(
            parent.trace_id, parent.span_id, flags=int(parent.trace_flags), trace_state=_state(parent)
        )

    def finish(self, record: RequestRecord) -> None:
        pass

    def shutdown(self, timeout_s: float = 5.0) -> None:
        pass


def build_tracing(config: TracingConfig) -> Tracing:
    """The tracer of one gateway process. Raises ValueError or OSError if the config cannot work."""
    if config.exporter == "none":
        return NoTracing()
    # The SDK is loaded only where it is used.
    from serve_app.telemetry.span_export import make_exporter
    from serve_app.telemetry.spans import SpanTracing

    return SpanTracing(make_exporter(config), config.sampling_ratio, config.service_name)


def extract(headers: Mapping[str, str]) -> trace.SpanContext | None:
    """The caller's span from lower-case (or case-insensitive) headers; None if absent, malformed or zero."""
    traceparent = headers.get("traceparent")
    if traceparent is None or len(traceparent) > MAX_HEADER:
        return None
    carrier = {"traceparent": traceparent}
    tracestate = headers.get("tracestate", "")
    if 0 < len(tracestate) <= MAX_HEADER:
        carrier["tracestate"] = tracestate
    context = trace.get_current_span(_propagator.extract(carrier)).get_span_context()
    return context if context.is_valid else None


def new_context(parent: trace.SpanContext | None, trace_id: int, sampled: bool) -> TraceContext:
    """Identity of a new root span: under `parent`, or beginning the trace `trace_id`."""
    span_id = secrets.randbits(64) or 1
    if parent is None:
        return TraceContext(trace_id, span_id, flags=RANDOM_FLAG | sampled)
    flags = (int(parent.trace_flags) & RANDOM_FLAG) | sampled
    return TraceContext(parent.trace_id, span_id, parent.span_id, flags, _state(parent))


def outgoing_headers(record: RequestRecord) -> dict[str, str]:
    """W3C headers naming the root span, for the response and for calls downstream; empty without one."""
    context = record.trace
    if context is None:
        return {}
    headers = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.flags:02x}"}
    if context.trace_state:
        headers["tracestate"] = context.trace_state
    return headers


def _state(context: trace.SpanContext) -> str:
    return context.trace_state.to_header() if context.trace_state else ""
