"""The quota store as Prometheus metric families: whether it answers, and what was done without it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class QuotaMetrics(Collector):
    """Keeps the newest state of the gateway's quota store; nothing before the first. Register it."""

    def __init__(self) -> None:
        self._state: tuple[bool, int, int] | None = None

    def update(self, available: bool, admitted_in_outages: int, owed: int) -> None:
        """Take the state: whether Redis answers, requests admitted without it, endings it has not confirmed."""
        self._state = (available, admitted_in_outages, owed)

    def collect(self) -> Iterator[Metric]:
        if self._state is None:
            return
        available, admitted, owed = self._state
        yield GaugeMetricFamily(
            "quota_store_available", "1 while Redis answers this gateway.", value=float(available)
        )
        yield CounterMetricFamily(
            "quota_admitted_in_outages",
            "Requests admitted without Redis, by the outage policies of their limits.",
            value=admitted,
        )
        yield GaugeMetricFamily(
            "quota_unconfirmed_endings",
            "Requests that ended and whose charge Redis has not confirmed yet.",
            value=owed,
        )
