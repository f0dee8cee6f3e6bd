"""Output lengths from a tenant's own history: a mean for scheduling, a quantile for reservations."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass
class _History:
    mean: float
    recent: deque[int]


class OutputLengthPredictor:
    """Output tokens per request and tenant.

    The mean follows new = (4 * old + actual) / 5 (the predictor of Sheng et al., OSDI'24) and starts from
    `default_tokens`; the quantile is taken over the last `history` requests. What a client allows
    (`max_tokens`) says little about what it gets and serves as a cap alone. The `max_tenants` tenants
    observed last are kept.
    """

    def __init__(self, *, default_tokens: int = 64, history: int = 128, max_tenants: int = 10_000) -> None:
        if min(default_tokens, history, max_tenants) < 1:
            raise ValueError("default_tokens, history and max_tenants must be at least 1")
        self._default_tokens = default_tokens
        self._history = history
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, _History] = OrderedDict()

    def observe(self, tenant: str, output_tokens: int) -> None:
        """Learn from a request that ended by itself; one that was cut off would teach too short a length."""
        history = self._tenants.get(tenant)
        if history is None:
            history = _History(float(self._default_tokens), deque(maxlen=self._history))
            self._tenants[tenant] = history
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        history.mean = (4.0 * history.mean + output_tokens) / 5.0
        history.recent.append(output_tokens)

    def predict(self, tenant: str, max_tokens: int) -> int:
        """Expected output tokens of one sequence, 1 to max_tokens: what a ticket is booked with."""
        history = self._tenants.get(tenant)
        expected = self._default_tokens if history is None else round(history.mean)
        return min(max(1, expected), max_tokens)

    def quantile(self, tenant: str, max_tokens: int, q: float = 0.9) -> int:
        """Length that a share `q` of the tenant's recent requests stayed within, at most max_tokens.

        Nearest rank; the default length for a tenant without history. Raises ValueError unless 0 < q <= 1.
        """
        if not 0.0 < q <= 1.0:
            raise ValueError(f"q must be in (0, 1], not {q}")
        history = self._tenants.get(tenant)
        if history is None:
            return min(self._default_tokens, max_tokens)
        ranked = sorted(history.recent)
        return min(max(1, ranked[math.ceil(q * len(ranked)) - 1]), max_tokens)
