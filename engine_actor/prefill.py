"""Which prompts the tokens that decodes leave in a step go to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine_actor.kv.cache import KVCache
from engine_actor.live import LiveRequests
from engine_actor.running import RunningSet
from engine_actor.sampling.state import MAX_PROMPT_LOGITS
from engine_actor.sequence import SequenceState
from engine_actor.service import ServiceAccounts
from policies.step_budget import split_prefill_budget


class Prefill:
    """Splits a step's prefill tokens so that tenants share the step by weight, what they decode in it included; inside
    a tenant in order of arrival.

    No request gets more than `chunk_size` tokens of a step, so several long prompts move together.
    """

    def __init__(
        self,
        live: LiveRequests,
        running: RunningSet,
        cache: KVCache,
        service: ServiceAccounts,
        *,
        chunk_size: int,
    ) -> None:
        self._live = live
        self._running = running
        self._cache = cache
        self._service = service
        self._chunk_size = chunk_size

    def rows(
        self, budget: int, step: int, before: Sequence[SequenceState], decodes: np.ndarray
    ) -> list[tuple[SequenceState, int]]:
        """Requests and their numbers of tokens in this step, with pages reserved for them.

        `before` are the requests with chunks in the step before, which may be in flight; `decodes` are the slots that
        decode in this one.
        """
        chunk = self._chunk_size
        queues = self._queues(before)
        sequences = self._running.sequences
        decoding = (
            Counter(s.tenant.name for slot in decodes.tolist() if (s := sequences[slot]))
            if len(queues) > 1
            else {}
        )
        shares = split_prefill_budget(
            {name: sum(min(chunk, s.pending) for s in queue) for name, queue in queues.items()},
            {name: self._live.tenants[name].weight for name in queues},
            budget,
            step,
            decoding,
        )
        rows: list[tuple[SequenceState, int]] = []
        prompt_logits = MAX_PROMPT_LOGITS
        for name, queue in queues.items():
            share = shares[name]
            for sequence in queue:
                length = min(chunk, sequence.pending, share)
                if length <= 0:
                    break
                if sequence.wants_prompt_logits:
                    length = min(length, prompt_logits)
                    prompt_logits -= length
                    if length <= 0:
                        continue
                if not self._running.reserve(sequence, sequence.computed + length):
                    continue  # the pages went to decodes; try again when one of them ends
                rows.append((sequence, length))
                share -= length
        return rows

    def skip_to(self, sequence: SequenceState, end: int) -> None:
        """Positions up to `end` are in pages found in the prefix cache."""
        self._service.cached(sequence, sequence.computed, end)
        self._live.count_prefill(sequence.tenant, sequence.computed - end)
        sequence.computed = end

    def _queues(self, before: Sequence[SequenceState]) -> dict[str, list[SequenceState]]:
        """Requests with tokens to prefill, per tenant; without those whose next page another one computes now.

        So N equal prompts that arrive together compute their common prefix once: the others wait for the first, and
        take its pages from the prefix cache (in-batch prefix caching in SGLang).
        """
        queues: dict[str, list[SequenceState]] = {}
        claimed = {
            self._cache.next_page(sequence.table, sequence.token_ids)
            for sequence in before
            if sequence.decoding and self._cache.prefix_caching
        }
        for name, tenant in self._live.tenants.items():
            for sequence in tenant.prefilling:
                if self._cache.prefix_caching and not sequence.wants_prompt_logits:
                    if end := self._running.extend(sequence):
                        self.skip_to(sequence, end)
                    claim = self._cache.next_page(sequence.table, sequence.token_ids)
                    if claim is not None:
                        if claim in claimed:
                            continue
                        claimed.add(claim)
                queues.setdefault(name, []).append(sequence)
        return queues
