"""A span exporter for machines without a collector: one JSON object a line, several processes to one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from serve_app.telemetry.jsonl import RotatingLines


class FileSpanExporter(SpanExporter):
    """Appends spans to a rotating file. Ids are hexadecimal, times are nanoseconds since the epoch."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._lines = RotatingLines(path)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        written = self._lines.write([json.dumps(as_object(span), separators=(",", ":")) for span in spans])
        return SpanExportResult.SUCCESS if written else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._lines.close()


def as_object(span: ReadableSpan) -> dict[str, object]:
    """One span as plain JSON values."""
    context = span.get_span_context()
    assert context is not None, "a finished span has a context"
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_span_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "kind": span.kind.name,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "status_description": span.status.description,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "time_ns": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
        "dropped_events": span.dropped_events,
        "resource": dict(span.resource.attributes),
    }
