"""The service of all tenants over all engines, counted once whatever is lost, late or restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from policies.engine_load import EngineLoad
from policies.output_length import OutputLength
from policies.tenant_account import TenantAccount
from policies.tickets import EngineReport

KEEPS_PLACE_SECONDS = 10.0
"""How long after a restore a tenant that waited before may come back without being lifted."""


@dataclass(frozen=True)
class TenantState:
    """A tenant's counters. `waiting`: it had tickets in the queue."""

    weight: float
    served: float
    counter: float
    waiting: bool


@dataclass(frozen=True)
class CountedService:
    """How far the service of an engine has been counted: per tenant, as of a step of an engine epoch."""

    engine_epoch: int
    step: int
    served: dict[str, float]


@dataclass(frozen=True)
class QueueState:
    """What a successor needs to go on with the same shares and predictions, as plain data. `last_to_leave` names a
    tenant."""

    queue_epoch: int
    tenants: dict[str, TenantState] = field(default_factory=dict)
    engines: dict[str, CountedService] = field(default_factory=dict)
    last_to_leave: str | None = None
    output_lengths: dict[str, OutputLength] = field(default_factory=dict)


class ServiceAccounts:
    """Every tenant seen so far. `changed` is called with each one whose place in the order may have moved.

    Reports carry cumulative service, so a lost one does no harm. What was counted of an engine is kept when the
    engine is gone: one that returns is not counted twice.
    """

    def __init__(self, changed: Callable[[TenantAccount], None]) -> None:
        self._changed = changed
        self.tenants: dict[str, TenantAccount] = {}
        self._engines: dict[str, CountedService] = {}

    def tenant(self, name: str) -> TenantAccount:
        """The account of a tenant, opened when it is new."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = TenantAccount(name, len(self.tenants))
        return tenant

    def is_old(self, report: EngineReport) -> bool:
        """A later report of the engine has been counted."""
        seen = self._engines.get(report.engine)
        return seen is not None and (report.engine_epoch, report.step) < (seen.engine_epoch, seen.step)

    def is_new_epoch(self, report: EngineReport) -> bool:
        """Nothing of this life of the engine has been counted."""
        seen = self._engines.get(report.engine)
        return seen is None or seen.engine_epoch != report.engine_epoch

    def count_service(self, report: EngineReport) -> None:
        """Add what the engine has served since it was last counted.

        The service of an engine never seen before was granted by somebody else, under lifts that are not known
        here. It is part of `served` and moves nobody in the order.
        """
        in_order = report.engine in self._engines
        counted = {} if self.is_new_epoch(report) else self._engines[report.engine].served
        for name, total in report.served.items():
            delta = total - counted.get(name, 0.0)
            if delta > 0:
                counted[name] = total
                tenant = self.tenant(name)
                tenant.serve(delta, in_order=in_order)
                self._changed(tenant)
        self._engines[report.engine] = CountedService(report.engine_epoch, report.step, counted)

    def update_outstanding(
        self, before: dict[str, float], after: dict[str, float], engines: Iterable[EngineLoad]
    ) -> None:
        """The outstanding work that one of the engines reports went from `before` to `after`."""
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                tenant = self.tenant(name)
                # Summed afresh: differences would drift. An engine's rounding must not turn into credit.
                tenant.outstanding = sum(
                    max(0.0, engine.report.outstanding.get(name, 0.0)) for engine in engines
                )
                self._changed(tenant)

    def export(self, queue_epoch: int, last_to_leave: TenantAccount | None) -> QueueState:
        """A copy of every counter."""
        return QueueState(
            queue_epoch,
            {
                name: TenantState(tenant.weight, tenant.served, tenant.counter, tenant.queued > 0)
                for name, tenant in self.tenants.items()
            },
            {
                name: CountedService(seen.engine_epoch, seen.step, dict(seen.served))
                for name, seen in self._engines.items()
            },
            None if last_to_leave is None else last_to_leave.name,
        )

    def restore(self, state: QueueState, now: float) -> None:
        """Go on from a predecessor's counters. Raises ValueError once anything has been counted."""
        if self._engines or self.tenants:
            raise ValueError("counters can be restored before the first ticket and report only")
        for name, saved in state.tenants.items():
            tenant = self.tenant(name)
            tenant.weight, tenant.served, tenant.counter = saved.weight, saved.served, saved.counter
            if saved.waiting:
                tenant.keeps_place_until = now + KEEPS_PLACE_SECONDS
        for name, seen in state.engines.items():
            self._engines[name] = CountedService(seen.engine_epoch, seen.step, dict(seen.served))
