"""Accounts of what an engine has served: in priced tokens per tenant, and in tokens by kind."""

from __future__ import annotations

from collections.abc import Mapping

from engine_actor.sequence import SequenceState
from engine_actor.stats import PrefixCounters
from engine_actor.tenant import Tenant
from policies.service import ServicePrices


class ServiceAccounts:
    """Charges each token once, when it is first served; what is computed again is charged to nobody."""

    def __init__(self, prices: ServicePrices) -> None:
        self.prices = prices
        self.served: dict[str, float] = {}
        self.prefix: dict[str, PrefixCounters] = {}
        self.recomputed_chunks = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.output_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens served so far, of every kind: it stands still while nothing new is served."""
        return self.cached_tokens + self.computed_tokens + self.output_tokens

    def computed(self, sequence: SequenceState, start: int, end: int) -> None:
        """Positions start .. end - 1 are in the step to come."""
        if start < sequence.served:
            self.recomputed_chunks += 1
        if fresh := self._serve(sequence, start, end):
            self.computed_tokens += fresh
            self._prefix(sequence).miss_tokens += fresh
            self._charge(sequence.tenant, self.prices.cost(computed_input=fresh))

    def cached(self, sequence: SequenceState, start: int, end: int) -> None:
        """Positions start .. end - 1 were found in the prefix cache."""
        if fresh := self._serve(sequence, start, end):
            sequence.cached_input += fresh
            self.cached_tokens += fresh
            self._prefix(sequence).hit_tokens += fresh
            self._charge(sequence.tenant, self.prices.cost(cached_input=fresh))

    def output(self, sampled: Mapping[Tenant, int]) -> None:
        """So many tokens have been sampled for each tenant."""
        for tenant, tokens in sampled.items():
            self.output_tokens += tokens
            self._charge(tenant, self.prices.cost(output=tokens))

    def _serve(self, sequence: SequenceState, start: int, end: int) -> int:
        """Note that positions up to `end` are served; returns the prompt tokens among them that were not before."""
        fresh = max(0, min(end, sequence.prompt_tokens) - max(start, sequence.served))
        sequence.tenant.input_left -= fresh
        sequence.served = max(sequence.served, end)
        return fresh

    def _prefix(self, sequence: SequenceState) -> PrefixCounters:
        return self.prefix.setdefault(sequence.tenant.name, PrefixCounters())

    def _charge(self, tenant: Tenant, cost: float) -> None:
        self.served[tenant.name] = self.served.get(tenant.name, 0.0) + cost
