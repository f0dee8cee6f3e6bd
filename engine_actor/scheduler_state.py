"""What a scheduler tells about its requests: numbers for reports and metrics, between two steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.cache import KVCache
from engine_actor.live import LiveRequests
from engine_actor.running import RunningSet
from engine_actor.service import ServiceAccounts
from engine_actor.stats import PrefixCounters


class SchedulerState:
    """Reads, and changes nothing. Not while a step is in flight, except where a method says so."""

    def __init__(
        self,
        live: LiveRequests,
        running: RunningSet,
        cache: KVCache,
        service: ServiceAccounts,
        utilization_limit: float,
    ) -> None:
        self._live = live
        self._running = running
        self._cache = cache
        self._service = service
        self._utilization_limit = utilization_limit

    def waiting_prefill_tokens(self) -> int:
        """Tokens of accepted prompts, and of outputs to be computed again, that are not scheduled yet."""
        return self._live.prefill_tokens

    def tenant_prefill_tokens(self) -> dict[str, int]:
        """The same per tenant."""
        return {name: t.prefill_tokens for name, t in self._live.tenants.items() if t.prefill_tokens}

    def live_sequences(self) -> dict[str, int]:
        """Running and waiting requests per tenant; tenants without any are left out."""
        return {name: tenant.live for name, tenant in self._live.tenants.items()}

    def tenant_pages(self) -> dict[str, int]:
        """KV pages in the tables of each tenant's running requests; a shared page counts in every table."""
        return {name: tenant.pages for name, tenant in self._live.tenants.items() if tenant.pages}

    def outstanding(self) -> dict[str, float]:
        """Priced work per tenant that is accepted and not served yet, by predicted output."""
        output = {
            name: sum(sequence.predicted_output_left for sequence in tenant.waiting)
            for name, tenant in self._live.tenants.items()
        }
        for sequence in self._running:
            output[sequence.tenant.name] += sequence.predicted_output_left
        return {
            name: self._service.prices.cost(computed_input=tenant.input_left, output=output[name])
            for name, tenant in self._live.tenants.items()
        }

    def prefix_counters(self) -> dict[str, PrefixCounters]:
        """What the prefix cache gave each tenant so far. May be called from another thread."""
        counters = {name: replace(own) for name, own in dict(self._service.prefix).items()}
        for owner, pages in dict(self._cache.evicted_by_owner).items():
            counters.setdefault(owner, PrefixCounters()).evicted_pages = pages
        return counters

    def unclaimed_pages(self) -> int:
        """Pages that new requests may take: free or evictable, inside the utilization limit, and needed by no live
        request for the tokens that it has already."""
        in_table, _, _ = self._running.memory()
        needed = -(-(self._running.known_tokens() + 1) // PAGE_SIZE)
        claimed = int(np.maximum(needed - in_table, 0).sum())
        claimed += sum(s.pages_to_start for tenant in self._live.tenants.values() for s in tenant.waiting)
        limit = int(self._utilization_limit * self._cache.total)
        return max(0, self._cache.available - (self._cache.total - limit) - claimed)

    def held_and_remaining(self) -> tuple[np.ndarray, np.ndarray]:
        """KV tokens that each live request holds, or will once its known tokens are computed, and output to come."""
        known = self._running.known_tokens()
        left = self._running.predicted_length[self._running.used] - known
        waiting = [sequence for tenant in self._live.tenants.values() for sequence in tenant.waiting]
        return (
            np.append(known, np.array([len(s.token_ids) for s in waiting], np.int64)),
            np.append(np.maximum(left, 0), np.array([s.predicted_output_left for s in waiting], np.int64)),
        )

    def decode_context(self) -> int:
        """KV tokens that the decode rows of a step read, when all decoding requests have one."""
        return self._running.decode_context()

    def predicted_ends(self) -> tuple[tuple[int, int], ...]:
        """Of each running request: steps until it ends, by its prediction and at least one, and pages it holds."""
        left = self._running.predicted_length[self._running.used] - self._running.known_tokens()
        pages = self._running.num_pages[self._running.used]
        return tuple(zip(np.maximum(left, 1).tolist(), pages.tolist(), strict=True))
