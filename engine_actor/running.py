"""The running requests as columns: what a step needs of all of them is read at once, not row by row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.cache import KVCache, SequencePages
from engine_actor.sequence import SequenceState
from engine_actor.step import Float32, Int32, UInt64

NO_PREDICTION_TOKENS = 16
"""Output tokens still expected of a request that has outlived its prediction."""


class RunningSet:
    """A slot for each running request and its page table; columns are indexed by slot.

    Invariant: `pages` mirrors the requests' own tables, and each tenant's `pages` counts those of its requests.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, max_pages: int) -> None:
        def column(dtype: type[np.generic] = np.int32) -> np.ndarray:
            return np.zeros(max_num_seqs, dtype)

        self._cache = cache
        self.sequences: list[SequenceState | None] = [None] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.id: Int32 = column()
        self.epoch: Int32 = column()
        self.computed: Int32 = column()
        self.known: Int32 = column()  # tokens known when it was admitted
        self.prompt_tokens: Int32 = column()
        self.predicted_length: Int32 = column()
        self.max_length: Int32 = column()
        self.temperature: Float32 = column(np.float32)
        self.top_k: Int32 = column()
        self.top_p: Float32 = column(np.float32)
        self.seed: UInt64 = column(np.uint64)
        self.has_wishes = column(np.bool_)
        self.used = column(np.bool_)
        self.decoding = column(np.bool_)
        self.last_turn = column(np.int64)  # grows with the step of its last decode row, and the place in it
        self.sampled_row: Int32 = column()  # its row of S in the last step that sampled for it
        self.num_pages: Int32 = column()
        self.pages: Int32 = np.zeros((max_num_seqs, max_pages), np.int32)

    def __len__(self) -> int:
        return len(self.sequences) - len(self._free_slots)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def __iter__(self) -> Iterator[SequenceState]:
        return (sequence for sequence in self.sequences if sequence is not None)

    def open(self, sequence: SequenceState) -> SequencePages:
        """A page table with what the prefix cache holds for the request; `add` or the cache's `close` comes next."""
        tenant = sequence.tenant
        known = [] if sequence.wants_prompt_logits else sequence.token_ids
        return self._cache.open(self._namespace(sequence), known, tenant.name, tenant.weight)

    def add(self, sequence: SequenceState, table: SequencePages) -> None:
        """Give a request a slot; it has to be computed up to its newest token before it decodes."""
        sequence.table = table
        sequence.tenant.pages += len(table.pages)
        slot = sequence.slot = self._free_slots.pop()
        sequence.decoding = False
        self.sequences[slot] = sequence
        self.used[slot] = True
        self.id[slot] = sequence.id
        self.epoch[slot] = sequence.epoch
        self.computed[slot] = sequence.computed
        self.known[slot] = len(sequence.token_ids)
        self.prompt_tokens[slot] = sequence.prompt_tokens
        self.predicted_length[slot] = sequence.predicted_length
        self.max_length[slot] = sequence.max_length
        self.decoding[slot] = False
        self.last_turn[slot] = 0
        params = sequence.request.sampling
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.seed[slot] = sequence.seed
        self.has_wishes[slot] = sequence.wishes is not None
        self._mirror(sequence, 0)

    def remove(self, sequence: SequenceState, *, keep: bool) -> None:
        """Take slot and pages back; with `keep`, what is computed stays in the prefix cache until room is needed.

        Without prefix caching only a preempted request, which will go on, finds kept pages again. What a step in flight
        computes for a request that has ended is not kept.
        """
        table = sequence.table
        if keep:
            self._cache.share(table, sequence.token_ids, min(sequence.computed, len(sequence.token_ids) - 1))
        sequence.tenant.pages -= len(table.pages)
        self._cache.close(table)
        slot, sequence.slot = sequence.slot, -1
        sequence.decoding = False
        self.used[slot] = self.decoding[slot] = False
        self.num_pages[slot] = 0
        self.sequences[slot] = None
        self._free_slots.append(slot)

    def forget(self, sequence: SequenceState) -> None:
        """The request has ended: pages kept for it alone are given up."""
        if not self._cache.prefix_caching and sequence.preemptions:
            self._cache.forget(self._namespace(sequence))

    def reserve(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` positions. False: not enough pages."""
        before = len(sequence.table.pages)
        if not self._cache.reserve(sequence.table, num_tokens):
            return False
        if len(sequence.table.pages) != before:
            self._changed(sequence, before, before)
        return True

    def extend(self, sequence: SequenceState) -> int:
        """Take pages that others have computed since the last chunk; returns the positions covered now, or 0."""
        table = sequence.table
        if sequence.wants_prompt_logits or table.shared != sequence.computed // PAGE_SIZE:
            return 0
        begin, before = table.shared, len(table.pages)
        if not self._cache.extend(table, sequence.token_ids):
            return 0
        self._changed(sequence, begin, before)
        self.computed[sequence.slot] = end = table.shared * PAGE_SIZE
        return end

    def share(self, sequence: SequenceState, computed: int) -> None:
        """Put the full pages of the `computed` positions into the prefix cache."""
        if self._cache.prefix_caching:
            begin, before = sequence.table.shared, len(sequence.table.pages)
            if self._cache.share(sequence.table, sequence.token_ids, computed):
                self._changed(sequence, begin, before)

    def _namespace(self, sequence: SequenceState) -> str:
        return sequence.request.namespace if self._cache.prefix_caching else f"request {sequence.id}"

    def _changed(self, sequence: SequenceState, begin: int, count: int) -> None:
        """The table changed from page number `begin` on and had `count` pages before."""
        sequence.tenant.pages += len(sequence.table.pages) - count
        self._mirror(sequence, begin)

    def _mirror(self, sequence: SequenceState, begin: int) -> None:
        pages = sequence.table.pages
        self.pages[sequence.slot, begin : len(pages)] = pages[begin:]
        self.num_pages[sequence.slot] = len(pages)

    def start_decoding(self, sequence: SequenceState) -> None:
        sequence.decoding = True
        self.decoding[sequence.slot] = True

    def decode_turn(self, limit: int) -> np.ndarray:
        """Slots of at most `limit` decoding requests: those whose last turn is longest ago.

        Not those that the step in flight brings to their greatest length.
        """
        slots = np.flatnonzero(self.decoding & (self.computed + 1 < self.max_length))
        if len(slots) > limit:
            slots = slots[np.argsort(self.last_turn[slots], kind="stable")[:limit]]
        return slots

    def any_needs_result(self) -> bool:
        """Whether a decoding request's next token has to wait until the one before is known."""
        for slot in np.flatnonzero(self.decoding & self.has_wishes).tolist():
            sequence = self.sequences[slot]
            if sequence is not None and sequence.wishes is not None and sequence.wishes.needs_result:
                return True
        return False

    def without_page(self, slots: np.ndarray) -> list[int]:
        """Those of the slots whose next token needs a page they do not have."""
        lacking: list[int] = slots[self.computed[slots] >= self.num_pages[slots] * PAGE_SIZE].tolist()
        return lacking

    def known_tokens(self) -> np.ndarray:
        """Tokens of prompt and output so far, of each running request in the order of slots; int64 [n]."""
        slots = np.flatnonzero(self.used)
        return np.maximum(self.computed[slots] + 1, self.known[slots]).astype(np.int64)

    def decode_context(self) -> int:
        """KV tokens that one token of every decoding request reads."""
        return int(self.computed[self.decoding].sum())

    def memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each running request, int64 [n]: pages in its table, pages for its known tokens, tokens still expected."""
        slots = np.flatnonzero(self.used)
        known = self.known_tokens()
        in_table = self.num_pages[slots].astype(np.int64)
        left = self.predicted_length[slots] - known
        left = np.where(left > 0, left, np.minimum(NO_PREDICTION_TOKENS, self.max_length[slots] - known))
        return in_table, np.maximum(in_table, -(-known // PAGE_SIZE)), np.maximum(left, 0)

    def predictions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each running request, int64 [n]: its length, its output, and the output still to come, as predicted."""
        slots = np.flatnonzero(self.used)
        length = self.predicted_length[slots].astype(np.int64)
        return length, length - self.prompt_tokens[slots], np.maximum(length - self.known_tokens(), 0)

    def table_columns(self, slots: np.ndarray, ends: np.ndarray) -> tuple[Int32, Int32]:
        """Page indices covering positions 0 .. ends - 1 of each slot, one after another, and their indptr."""
        counts = -(-ends // PAGE_SIZE)
        indptr = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        width = self.pages.shape[1]
        flat = np.repeat(slots * width - indptr[:-1], counts) + np.arange(indptr[-1])
        return self.pages.reshape(-1)[flat], indptr
