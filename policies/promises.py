"""The promises given to tickets that still wait, as columns: a walk over thousands takes microseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.virtual_time import Floats, Indices


class Promise(NamedTuple):
    """A first token by `due` (monotonic s), for a ticket that waits.

    `level` orders the classes, 0 first. `start` is the virtual time at which its turn comes, and `virtual_cost` by how
    much it delays later ones of its tenant. `catch_up_seconds` after `given_at` the others will have caught up with its
    tenant; `engine_seconds` it takes from its turn to the first token, of which `prefill_seconds` cannot be avoided.
    `margin` multiplies the error margin. The first token was expected `expected_seconds` after `given_at`, and within
    `upper_seconds` with the margin.
    """

    request: str
    tenant: int
    level: int
    due: float
    start: float
    engine_seconds: float
    prefill_seconds: float
    margin: float
    given_at: float
    catch_up_seconds: float
    virtual_cost: float
    expected_seconds: float
    upper_seconds: float


class PromiseTable:
    """Live promises by request. Columns are views [n], valid until the next change."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._promises: list[Promise] = []
        self._integers: Indices = np.zeros((2, 64), np.intp)
        self._numbers: Floats = np.zeros((7, 64))

    def __len__(self) -> int:
        return len(self._promises)

    @property
    def tenant(self) -> Indices:
        return self._integers[0, : len(self)]

    @property
    def level(self) -> Indices:
        return self._integers[1, : len(self)]

    @property
    def due(self) -> Floats:
        return self._numbers[0, : len(self)]

    @property
    def start(self) -> Floats:
        return self._numbers[1, : len(self)]

    @property
    def engine_seconds(self) -> Floats:
        return self._numbers[2, : len(self)]

    @property
    def prefill_seconds(self) -> Floats:
        return self._numbers[3, : len(self)]

    @property
    def margin(self) -> Floats:
        return self._numbers[4, : len(self)]

    @property
    def given_at(self) -> Floats:
        return self._numbers[5, : len(self)]

    @property
    def catch_up_seconds(self) -> Floats:
        return self._numbers[6, : len(self)]

    def get(self, request: str) -> Promise | None:
        row = self._rows.get(request)
        return None if row is None else self._promises[row]

    def requests(self, rows: npt.NDArray[np.bool_]) -> list[str]:
        """Requests of the rows where the mask [n] is set."""
        return [self._promises[index].request for index in np.flatnonzero(rows)]

    def add(self, promise: Promise) -> None:
        """Add a promise, in the place of an older one to the same request."""
        self.pop(promise.request)
        row = len(self._promises)
        if row == self._integers.shape[1]:
            self._integers = np.concatenate((self._integers, np.zeros_like(self._integers)), axis=1)
            self._numbers = np.concatenate((self._numbers, np.zeros_like(self._numbers)), axis=1)
        self._rows[promise.request] = row
        self._promises.append(promise)
        self._integers[:, row] = promise[1:3]
        self._numbers[:, row] = promise[3:10]

    def pop(self, request: str) -> Promise | None:
        """Take a promise out; None when there is none."""
        row = self._rows.pop(request, None)
        if row is None:
            return None
        promise, last = self._promises[row], self._promises.pop()
        if last is not promise:
            end = len(self._promises)
            self._promises[row] = last
            self._rows[last.request] = row
            self._integers[:, row] = self._integers[:, end]
            self._numbers[:, row] = self._numbers[:, end]
        return promise
