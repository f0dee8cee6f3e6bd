"""Whether a waiting request fits beside the running ones, now and until they end."""

from __future__ import annotations

import numpy as np

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.cache import KVCache, SequencePages
from engine_actor.running import RunningSet
from engine_actor.sequence import SequenceState
from policies.memory import ends_crowd, estimate_peak_tokens


class Admission:
    """Admission by the estimated peak of KV memory (Gong et al., Past-Future scheduler, arXiv 2507.10150).

    `utilization_limit` is the part of the pool that the peak may take, `watermark` the part that has to stay
    available beside the prompts of all admitted requests. A request that would run alone is bound by neither.
    """

    def __init__(
        self, cache: KVCache, running: RunningSet, *, utilization_limit: float, watermark: float
    ) -> None:
        self._cache = cache
        self._running = running
        self._limit = int(utilization_limit * cache.total) * PAGE_SIZE
        self._watermark = int(watermark * cache.total)
        self._refused_at: int | None = None  # step in which memory was lacking last

    def waits_for_spread(self, sequence: SequenceState, step: int) -> bool:
        """Whether the request is to start some steps later, so that memory does not come free all at once.

        Only while memory is what requests wait for: one did not fit within as many steps as this one will run. Never
        one that was preempted, or the only one of its tenant.
        """
        if (
            self._refused_at is None
            or step - self._refused_at > sequence.predicted_output
            or sequence.preemptions
            or not sequence.tenant.running
        ):
            return False
        return ends_crowd(
            *self._running.predictions(),
            own_output=sequence.predicted_output,
            own_remaining=sequence.predicted_output_left,
            kv_tokens=self._cache.total * PAGE_SIZE,
            limit=len(self._running.sequences),
        )

    def fits(self, sequence: SequenceState, table: SequencePages, step: int) -> bool:
        """Whether the request may start, with a `table` just opened for it."""
        fits = self._fits(sequence, table)
        if not fits:
            self._refused_at = step
        return fits

    def _fits(self, sequence: SequenceState, table: SequencePages) -> bool:
        cache, running = self._cache, self._running
        missing = sequence.pages_to_start - len(table.pages)
        if not len(running):
            return missing <= cache.available
        in_table, held, left = running.memory()
        tables = int(in_table.sum())
        if missing + int(held.sum()) - tables + self._watermark > cache.available:
            return False
        # A shared page stands in several tables: each of them is counted with its part.
        tables += len(table.pages)
        repeated = 1.0 - (cache.total - cache.available) / max(1, tables)
        own = missing + len(table.pages) * (1.0 - repeated)
        own_left = max(0, sequence.predicted_length - len(sequence.token_ids))
        held_tokens = np.append(held - in_table * repeated, own) * PAGE_SIZE
        return estimate_peak_tokens(held_tokens.astype(np.int64), np.append(left, own_left)) <= self._limit
