"""When a tenant's turn comes if the others ask for all of their share: weighted fair queueing as a fluid.

In the fair queue the least virtual service goes first. A ticket that starts at virtual time S waits until every active
tenant j with key_j < S has been served weight_j * (S - key_j): the fluid of generalised processor sharing (Parekh and
Gallager, 1993), with the queue's own keys as virtual times.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from policies.queue_order import INTERACTIVE_LEAD

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

ACTIVE_SECONDS = 30.0
"""A tenant counts as one of those that share the pool for this long after its last ticket."""

_RATE_SECONDS = 10.0  # time constant of a tenant's arrival rate
_COLUMNS = 7
_KEY, _WEIGHT, _BACKLOG, _RATE, _SEEN, _INTERACTIVE, _COUNTER = range(_COLUMNS)


class Fluid:
    """Tenants that share a pool at one moment, by key and weight, float64 [m]."""

    def __init__(self, keys: Floats, weights: Floats, demand: Floats, rates: Floats) -> None:
        """`demand` is the priced work that waits, `rates` what comes per second."""
        self._raw = (keys, weights, demand, rates)
        order = np.argsort(keys)
        self._keys = keys[order]
        sorted_weights = weights[order]
        self._weight = np.concatenate(([0.0], np.cumsum(sorted_weights)))
        self._weighted_key = np.concatenate(([0.0], np.cumsum(sorted_weights * self._keys)))

    def service_until(self, virtual_time: Floats) -> Floats:
        """Priced work done until every key has reached `virtual_time` [n], if all have work without end: [n]."""
        position = np.searchsorted(self._keys, virtual_time)
        service: Floats = virtual_time * self._weight[position] - self._weighted_key[position]
        return service

    def likely_until(self, virtual_time: float, rate: float) -> float:
        """The same if tenants have what waits, and what comes meanwhile as it came lately. `rate` is the pool's
        priced work per second."""
        keys, weights, demand, rates = self._raw
        most = weights * np.maximum(virtual_time - keys, 0.0)
        now = float(np.minimum(most, demand).sum())
        return float(np.minimum(most, demand + rates * (now / rate)).sum())

    @property
    def demand(self) -> tuple[float, float]:
        """Priced work that waits in all, and that comes per second."""
        return float(self._raw[2].sum()), float(self._raw[3].sum())

    @property
    def total_weight(self) -> float:
        return float(self._weight[-1])


class VirtualTime:
    """What counts of all tenants as columns, by tenant number. Times in s, service in priced tokens."""

    def __init__(self) -> None:
        self._columns = _empty(16)

    def set(
        self,
        tenants: list[int],
        *,
        keys: list[float],
        counters: list[float],
        weights: list[float],
        backlogs: list[float],
    ) -> None:
        """New values of some tenants; a backlog is the priced work of the waiting tickets."""
        self._grow(max(tenants))
        for column, values in ((_KEY, keys), (_COUNTER, counters), (_WEIGHT, weights), (_BACKLOG, backlogs)):
            self._columns[column, tenants] = values

    def saw_ticket(self, tenant: int, now: float, *, cost: float, interactive: bool) -> None:
        self._grow(tenant)
        mine = self._columns[:, tenant]
        idle = max(0.0, now - mine[_SEEN])
        mine[_RATE] = mine[_RATE] * np.exp(-idle / _RATE_SECONDS) + cost / _RATE_SECONDS
        mine[_SEEN] = now
        if interactive:
            mine[_INTERACTIVE] = now

    def is_active(self, tenant: int, now: float) -> bool:
        """Whether the tenant is among those that share the pool."""
        return tenant < self._columns.shape[1] and bool(self._active(now)[tenant])

    def counter_floor(self) -> float:
        """The least counter of a tenant with waiting tickets, to which a returning one is lifted; else -inf."""
        waiting = self._columns[_BACKLOG] > 0.0
        return float(self._columns[_COUNTER, waiting].min()) if waiting.any() else -np.inf

    def fluid(self, now: float, level: int, *, without: int | None = None) -> Fluid:
        """The active tenants as tickets of class `level` see them: 0 interactive, 1 default, 2 batch.

        `without` leaves one tenant out.
        """
        active = self._active(now)
        if without is not None and without < len(active):
            active[without] = False
        seen = self._columns[_SEEN, active]
        rates = self._columns[_RATE, active] * np.exp(np.minimum(seen - now, 0.0) / _RATE_SECONDS)
        keys = self._keys(level, now)[active]
        return Fluid(keys, self._columns[_WEIGHT, active], self._columns[_BACKLOG, active], rates)

    def own_service(self, tenants: Indices, virtual_time: Floats, level: int, now: float) -> Floats:
        """What each of `tenants` [n] has in the fluid until `virtual_time` [n]."""
        keys, weights = self._keys(level, now)[tenants], self._columns[_WEIGHT, tenants]
        service: Floats = weights * np.maximum(virtual_time - keys, 0.0) * self._active(now)[tenants]
        return service

    def keys(self, tenants: Indices) -> Floats:
        """Keys of `tenants` [n]."""
        keys: Floats = self._columns[_KEY, tenants]
        return keys

    def weights(self, tenants: Indices) -> Floats:
        """Weights of `tenants` [n]."""
        weights: Floats = self._columns[_WEIGHT, tenants]
        return weights

    def _active(self, now: float) -> Mask:
        recent: Mask = (self._columns[_SEEN] >= now - ACTIVE_SECONDS) | (self._columns[_BACKLOG] > 0.0)
        return recent

    def _keys(self, level: int, now: float) -> Floats:
        """Where the others stand for tickets of a class: those with interactive tickets have the lead of that class
        over default ones, and interactive tickets have it over tenants without any."""
        keys: Floats = self._columns[_KEY].copy()
        leading = self._columns[_INTERACTIVE] >= now - ACTIVE_SECONDS
        keys[leading] += key_shift(level, interactive=True)
        keys[~leading] += key_shift(level, interactive=False)
        return keys

    def _grow(self, tenant: int) -> None:
        size = self._columns.shape[1]
        if tenant >= size:
            self._columns = np.concatenate((self._columns, _empty(max(size, tenant + 1 - size))), axis=1)


def key_shift(level: int, *, interactive: bool) -> float:
    """By how much a tenant, with interactive tickets or without any, stands elsewhere for tickets of a class."""
    if level == 0 and not interactive:
        return INTERACTIVE_LEAD
    return -INTERACTIVE_LEAD if level == 1 and interactive else 0.0


def _empty(tenants: int) -> Floats:
    columns = np.zeros((_COLUMNS, tenants))
    columns[_WEIGHT] = 1.0
    columns[_SEEN] = columns[_INTERACTIVE] = -np.inf
    return columns
