"""The fair queues as Prometheus metric families: what each tenant waits for, was served and has booked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from policies.fair_queue import TenantSnapshot

if TYPE_CHECKING:
    from serve_app.queue_messages import QueueSnapshot

LABELS = ("model", "tenant")

GAUGES: dict[str, tuple[str, Callable[[TenantSnapshot], float]]] = {
    "fair_queue_queued_requests": ("Requests that wait for entry.", lambda t: t.queued),
    "fair_queue_booked_tokens": (
        "Priced tokens granted and not served yet, by predicted output.",
        lambda t: t.booked,
    ),
}


class QueueMetrics(Collector):
    """Keeps the newest snapshot of each model's queue. Register it with a CollectorRegistry.

    A successor of a queue goes on with its service. Without a snapshot it begins anew, as a counter may.
    """

    def __init__(self, tenant_label: Callable[[str], str]) -> None:
        """`tenant_label` bounds the number of series: it gives the label a tenant goes under."""
        self._tenant_label = tenant_label
        self._snapshots: dict[str, QueueSnapshot] = {}

    def update(self, model: str, snapshot: QueueSnapshot | None) -> None:
        """Take the newest state of a queue, None when it does not answer: better no series than a frozen one."""
        if snapshot is None:
            self._snapshots.pop(model, None)
        else:
            self._snapshots[model] = snapshot

    def collect(self) -> Iterator[Metric]:
        for name, (help_text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            for labels, total in self._sums(value):
                gauge.add_metric(labels, total)
            yield gauge
        served = CounterMetricFamily(
            "tenant_service_tokens",
            "Service in priced tokens: input, cached input and output by the prices of the fair queue.",
            labels=LABELS,
        )
        for labels, total in self._sums(lambda tenant: tenant.served):
            served.add_metric(labels, total)
        yield served
        epoch = GaugeMetricFamily(
            "fair_queue_epoch",
            "Epoch of the scheduling authority; a successor's is higher.",
            labels=("model",),
        )
        protection = GaugeMetricFamily(
            "protection_step",
            "What is given up since a protection line was crossed: 0 nothing, 1 batch, 2 long prompts too, above that "
            "smaller batches.",
            labels=("model",),
        )
        for model, snapshot in self._snapshots.items():
            epoch.add_metric((model,), snapshot.queue_epoch)
            protection.add_metric((model,), snapshot.protection_step)
        yield epoch
        yield protection

    def _sums(self, value: Callable[[TenantSnapshot], float]) -> list[tuple[tuple[str, str], float]]:
        sums: dict[tuple[str, str], float] = {}
        for model, snapshot in self._snapshots.items():
            for name, tenant in snapshot.tenants.items():
                labels = (model, self._tenant_label(name))
                sums[labels] = sums.get(labels, 0.0) + value(tenant)
        return list(sums.items())
