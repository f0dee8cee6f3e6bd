"""Where spans go, and the rule that a request's spans go there together or not at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from serve_app.telemetry.span_file import FileSpanExporter
from serve_app.telemetry.tracing import TracingConfig

logger = logging.getLogger(__name__)

QUEUE_REQUESTS = 2048
"""Requests whose spans wait for a slow collector; further ones are dropped."""

EXPORT_TIMEOUT_S = 5.0


def make_exporter(config: TracingConfig) -> SpanExporter:
    """Raises ValueError for a file exporter without a path, OSError if its file cannot be opened."""
    if config.exporter == "otlp":
        return OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_TIMEOUT_S)
    if config.path is None:
        raise ValueError("the file exporter needs a path")
    return FileSpanExporter(config.path)


class WholeRequests(SpanExporter):
    """Keeps the spans of a request together between a batch processor and the real exporter.

    The processor cuts batches and drops from a full queue by span: children would lose their root. So a
    request has to be admitted before its spans are made, which bounds the queue by requests, and a batch that
    ends inside a request is held back from there on. Relies on a request's spans being ended in one go, its
    root (the span of kind SERVER) last.
    """

    def __init__(self, exporter: SpanExporter, max_requests: int = QUEUE_REQUESTS) -> None:
        self._exporter = exporter
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._waiting = 0
        self._dropping = False
        self._begun: list[ReadableSpan] = []
        self._closed = False

    def admit(self) -> bool:
        """Room for one more request? If not, its spans must not be made. Logged once per outage."""
        with self._lock:
            if self._waiting < self._max_requests:
                self._waiting += 1
                return True
            if not self._dropping:
                self._dropping = True
                logger.warning("spans are dropped: %d requests wait for the exporter", self._waiting)
            return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        spans = [*self._begun, *spans]
        roots = [index for index, span in enumerate(spans) if span.kind is SpanKind.SERVER]
        complete = roots[-1] + 1 if roots else 0
        self._begun = spans[complete:]
        if not complete:
            return SpanExportResult.SUCCESS
        try:
            return self._exporter.export(spans[:complete])
        finally:
            with self._lock:
                self._waiting -= len(roots)
                self._dropping = False

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()
