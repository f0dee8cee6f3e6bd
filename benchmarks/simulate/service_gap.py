"""The service gap between tenants, measured while it arises."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

MAX_TENANTS = 64
"""Pairs are compared among this many tenants at most."""


class ServiceGapMeter:
    """Differences of service between tenants that are backlogged over the same time.

    For two tenants f and g, both backlogged over [t1, t2), the gap is |W_f - W_g| with W the service per weight
    that they got from t1 to t2 (Sheng et al., OSDI'24, section 4). The gap at a moment is the largest over all
    pairs and all t1 up to which their common backlog reaches back; `max` is the largest of all, `mean` the mean
    over the time in which some pair is backlogged. Both are 0 while there was no such pair.

    A tenant is backlogged while a request of it waits in the fair queue. Tenants with batch work, in `batch`, are
    compared among themselves only: batch yields to everything else.
    """

    def __init__(self, weights: Mapping[str, float], batch: Collection[str] = ()) -> None:
        self.tenants = list(weights)
        self._weights = np.array([weights[name] for name in self.tenants])
        n = len(self.tenants)
        group = np.array([name in batch for name in self.tenants])
        self._comparable = (group[:, None] == group[None, :]) & ~np.eye(n, dtype=np.bool_)
        self._lowest = np.zeros((n, n))
        self._highest = np.zeros((n, n))
        self._together = np.zeros((n, n), np.bool_)
        self._service = np.zeros(n)
        self._backlogged = np.zeros(n, np.bool_)
        self._backlogged_seconds = np.zeros(n)
        self._backlogged_service = np.zeros(n)
        self._now = 0.0
        self._weighted_gap = 0.0
        self._gap_seconds = 0.0
        self.max = 0.0
        self.curve: list[tuple[float, float]] = []
        """(seconds, gap at that moment), one for every observation with a pair of backlogged tenants."""
        self.service_curve: list[tuple[float, npt.NDArray[np.float64]]] = []
        """(seconds, service per weight of each of `tenants`), one for every observation."""

    @property
    def mean(self) -> float:
        return self._weighted_gap / self._gap_seconds if self._gap_seconds else 0.0

    def observe(
        self, now: float, served: Mapping[str, float], waiting: Mapping[str, int], emptied: set[str]
    ) -> None:
        """Take the state at `now`: cumulative service, requests waiting, and tenants whose queue was empty at
        some moment since the last observation."""
        seconds = now - self._now
        service = np.array([served.get(name, 0.0) for name in self.tenants]) / self._weights
        backlogged = np.array([waiting.get(name, 0) > 0 for name in self.tenants])
        continued = self._backlogged & np.array([name not in emptied for name in self.tenants])
        self._backlogged_seconds += seconds * continued
        self._backlogged_service += (service - self._service) * continued
        self._now, self._service, self._backlogged = now, service, backlogged

        self.service_curve.append((now, service))
        # Up to here the common backlog of `lasting` pairs has gone on: this moment still belongs to it.
        lasting = self._together & continued[:, None] & continued[None, :]
        difference = service[:, None] - service[None, :]
        if lasting.any():
            self._lowest = np.where(lasting, np.minimum(self._lowest, difference), difference)
            self._highest = np.where(lasting, np.maximum(self._highest, difference), difference)
            gap = float(np.max(np.where(lasting, self._highest - difference, 0.0)))
            self.max = max(self.max, gap)
            self._weighted_gap += gap * seconds
            self._gap_seconds += seconds
            self.curve.append((now, gap))
        else:
            self._lowest, self._highest = difference.copy(), difference.copy()
        self._together = backlogged[:, None] & backlogged[None, :] & self._comparable

    def jain(self) -> float | None:
        """Jain's index of the rates of service per weight that tenants got while backlogged; 1 is equal rates.

        Jain, Chiu and Hawe (DEC-TR-301, 1984). None if no tenant was ever backlogged.
        """
        seconds = self._backlogged_seconds
        rates = self._backlogged_service[seconds > 0] / seconds[seconds > 0]
        return jain_index(rates) if len(rates) and rates.any() else None


def jain_index(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """(sum x)^2 / (n * sum x^2): from 1/n, one has all, to 1, all have the same."""
    x = np.asarray(values, np.float64)
    return float(x.sum() ** 2 / (len(x) * (x**2).sum()))
