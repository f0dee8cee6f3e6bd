"""Output lengths from a tenant's own history: a mean for scheduling, a quantile for reservations."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

LONGEST_SHARE = 0.9


@dataclass(frozen=True)
class OutputLength:
    """Output tokens of one sequence of a tenant: their mean, and what LONGEST_SHARE of the recent ones stayed within.

    What a client allows (`max_tokens`) says little about what it gets and serves as a cap alone.
    """

    mean: float
    longest: int

    def expected(self, max_tokens: int) -> int:
        """Expected output tokens, 1 to max_tokens: what a ticket is booked with."""
        return min(max(1, round(self.mean)), max_tokens)

    def bound(self, max_tokens: int) -> int:
        """Output tokens that are hardly exceeded, 1 to max_tokens."""
        return min(max(1, self.longest), max_tokens)


DEFAULT_OUTPUT_LENGTH = OutputLength(64.0, 64)
"""Of a tenant without history."""


@dataclass
class _History:
    mean: float
    recent: deque[int]
    length: OutputLength = field(init=False)

    def update(self) -> None:
        ranked = sorted(self.recent)
        self.length = OutputLength(self.mean, ranked[math.ceil(LONGEST_SHARE * len(ranked)) - 1])


class OutputLengthPredictor:
    """Learns output lengths per tenant.

    The mean follows new = (4 * old + actual) / 5 (the predictor of Sheng et al., OSDI'24) and starts from the default;
    the quantile, by nearest rank, is taken over the last `history` requests. The `max_tenants` tenants observed last
    are kept.
    """

    def __init__(self, *, history: int = 128, max_tenants: int = 10_000) -> None:
        if min(history, max_tenants) < 1:
            raise ValueError("history and max_tenants must be at least 1")
        self._history = history
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, _History] = OrderedDict()

    def observe(self, tenant: str, output_tokens: int) -> None:
        """Learn from a request that ended by itself; one that was cut off would teach too short a length."""
        history = self._tenants.get(tenant)
        if history is None:
            history = self._open(tenant, DEFAULT_OUTPUT_LENGTH.mean)
        self._tenants.move_to_end(tenant)
        history.mean = (4.0 * history.mean + output_tokens) / 5.0
        history.recent.append(output_tokens)
        history.update()

    def of(self, tenant: str) -> OutputLength:
        history = self._tenants.get(tenant)
        return DEFAULT_OUTPUT_LENGTH if history is None else history.length

    def export(self) -> dict[str, OutputLength]:
        """Of every tenant with a history, the one observed last at the end."""
        return {name: history.length for name, history in self._tenants.items()}

    def restore(self, lengths: Mapping[str, OutputLength]) -> None:
        """Go on from what another one exported; of its recent requests the long one alone is known."""
        for tenant, length in lengths.items():
            history = self._open(tenant, length.mean)
            history.recent.append(length.longest)
            history.update()

    def _open(self, tenant: str, mean: float) -> _History:
        history = self._tenants[tenant] = _History(mean, deque(maxlen=self._history))
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        return history
