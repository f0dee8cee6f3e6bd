"""One request's telemetry from arrival to end, in one place for the gateway."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.metrics import GatewayMetrics
from serve_app.telemetry.records import Outcome, RequestRecord
from serve_app.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)


class GatewayTelemetry:
    """Spans, metrics and access log fed from one record, exactly once per request.

    Nothing here fails a request: an error of the telemetry itself is logged once per kind and swallowed.
    """

    def __init__(self, tracing: Tracing, metrics: GatewayMetrics, access_log: AccessLog | None) -> None:
        self.tracing = tracing
        self.metrics = metrics
        self.access_log = access_log
        self._failed: set[str] = set()

    def begin(
        self, request: str, route: str, headers: Mapping[str, str], method: str = "POST"
    ) -> RequestRecord:
        """The record of a request that just arrived. `headers` have lower-case or case-insensitive names."""
        record = RequestRecord(request=request, route=route, method=method)
        try:
            record.trace = self.tracing.begin(headers)
        except Exception:
            self._failure("trace context")
        return record

    def end(
        self, record: RequestRecord, outcome: Outcome, status: int, error_code: str | None = None
    ) -> None:
        """The request is over. Only the first call for a record counts: every exit path may call it."""
        if record.outcome is not None:
            return
        record.finish(outcome, status, error_code)
        for name, report in (
            ("metrics", self.metrics.observe),
            ("spans", self.tracing.finish),
            ("access log", self.access_log.write if self.access_log else None),
        ):
            try:
                if report is not None:
                    report(record)
            except Exception:
                self._failure(name)

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush spans for at most `timeout_s`, close the log."""
        self.tracing.shutdown(timeout_s)
        if self.access_log is not None:
            self.access_log.close()

    def _failure(self, name: str) -> None:
        if name not in self._failed:
            self._failed.add(name)
            logger.exception("telemetry: %s failed; further failures of it are not logged", name)
