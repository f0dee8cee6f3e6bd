"""The access log: one JSON object a line and request, on stderr or in a rotating file. No key, no prompt."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from serve_app.telemetry.jsonl import RotatingLines
from serve_app.telemetry.records import RequestRecord, bounded


class AccessLog:
    """Writes finished requests. A line may be lost, a request may not: `write` never raises for I/O."""

    def __init__(self, path: Path | None = None, stream: TextIO | None = None) -> None:
        """To `path` if given, else to `stream`, else to stderr. Raises OSError if `path` cannot be opened."""
        self._file = RotatingLines(path) if path is not None else None
        self._stream = stream or sys.stderr

    def write(self, record: RequestRecord) -> None:
        line = json.dumps(entry(record), separators=(",", ":"))  # ASCII: every control character is escaped
        if self._file is not None:
            self._file.write([line])
            return
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            return

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def entry(record: RequestRecord) -> dict[str, object]:
    """The fields of one line; times in milliseconds, `time` is the arrival in UTC."""
    arrived = datetime.fromtimestamp(record.started_wall_ns / 1e9, timezone.utc)
    usage = record.usage
    return {
        "time": arrived.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request": bounded(record.request),
        "trace": f"{record.trace.trace_id:032x}" if record.trace else None,
        "tenant": record.tenant,
        "key": record.key_fingerprint,
        "model": None if record.model is None else bounded(record.model),
        "route": bounded(record.route),
        "stream": record.stream,
        "status": record.status,
        "outcome": record.outcome,
        "code": record.error_code,
        "finish_reasons": record.finish_reasons[:16],
        "engine": record.engine,
        "admission": record.admission,
        "deadline_met": record.deadline_met,
        "attempts": record.attempts,
        "input_tokens": usage.computed_input + usage.cached_input,
        "cached_tokens": usage.cached_input,
        "output_tokens": usage.output,
        "queue_ms": _rounded(record.queue_ms),
        "ttft_ms": _rounded(record.first_token_ms),
        "e2e_ms": _rounded(record.finished_ms),
        "stages_ms": {name: _rounded(value) for name, value in record.stages_ms().items()},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
