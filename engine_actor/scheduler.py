"""Iteration-level scheduler: which tokens of which requests the next step computes.

Torch-free and clock-free: time comes in as an argument, so a simulator can drive it. One cycle is

    record = scheduler.schedule(now)        state moves here, once
    result = runner.run(record)
    rows = scheduler.commit(record, result, now)

Decode rows come first, prefill in chunks fills the rest of the token budget (Agrawal et al., "Sarathi-Serve",
OSDI'24). A result is matched to its record by request id and epoch; an abort is a flag that is acted on between
steps, so a page is never freed while a record in flight names it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.cache import KVCache, SequencePages, pages_for
from engine_actor.request import EngineRequest, FinishReason, StreamRow
from engine_actor.sampling.state import (
    MAX_PROMPT_LOGITS,
    NO_LOGPROBS,
    SamplingState,
    following,
    prompt_columns,
    step_logprobs,
    with_wishes,
)
from engine_actor.sequence import SequenceState, derive_seed
from engine_actor.step import SamplingColumns, StepRecord, StepResult
from policies.memory import VictimCandidate, choose_victim
from policies.service import DEFAULT_PRICES, ServicePrices
from policies.step_budget import prefill_floor, split_prefill_budget

_REMEMBERED_REQUESTS = 10_000


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one engine. `prefill_chunk_size` is the upper bound of one request's tokens in one step.

    `kv_cache_utilization_limit` is the share of the pool that new requests may fill.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_chunk_size: int
    kv_cache_utilization_limit: float = 1.0
    prefix_caching: bool = True


class Scheduler:
    """Owns the live requests and their pages. Not thread-safe: one thread drives it.

    Invariants:
    - a request is in exactly one of `_waiting` and `_running`; only running ones hold pages;
    - the oldest live request is never preempted while another runs, so it always ends;
    - `computed` moves in `schedule` alone; `commit` appends sampled tokens and ends requests.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_pages: int,
        *,
        epoch: int = 0,
        prices: ServicePrices = DEFAULT_PRICES,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.cache = KVCache(num_pages, prefix_caching=config.prefix_caching)
        self.step = 0
        self.recomputed_chunks = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.nonfinite_requests = 0
        self.served: dict[str, float] = {}
        self.prefill_chunks: list[int] = []
        """Sizes in tokens of the prompt chunks of the step scheduled last."""
        self._prices = prices
        self._next_id = 0
        self._live: dict[int, SequenceState] = {}
        self._by_key: dict[tuple[str, int], SequenceState] = {}
        self._recent: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._finished_rows: list[StreamRow] = []
        self.first_tokens: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED_REQUESTS)
        """Tickets of sequences whose first token came in the commits so far. Whoever reports them empties it."""
        self.completed: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED_REQUESTS)
        """Tickets of sequences that ended by themselves, in the same way."""

    @property
    def running(self) -> Sequence[SequenceState]:
        """The requests that hold pages. Not to be changed."""
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._finished_rows)

    def submit(self, request: EngineRequest, now: float) -> bool:
        """Take a request; False if this (request, attempt) was taken before.

        A request that can never run ends at once: its last row, with the reason, comes from the next `schedule`.
        """
        key = (request.request, request.attempt)
        if key in self._by_key or key in self._recent:
            return False
        self._remember(key)
        room = min(self.config.max_model_len, self.cache.total * PAGE_SIZE) - len(request.prompt_token_ids)
        error = None
        if not request.prompt_token_ids:
            error = "the prompt is empty"
        elif request.sampling.max_tokens < 0:
            error = "max_tokens must not be negative"
        elif room < min(1, request.sampling.max_tokens):
            error = "the prompt does not fit the engine's context or KV cache"
        if error is not None:
            self._finished_rows.append(StreamRow(*key, token_ids=(), finish_reason="error", error=error))
            return True
        sequence = SequenceState(
            id=self._next_id,
            request=request,
            token_ids=list(request.prompt_token_ids),
            max_tokens=min(request.sampling.max_tokens, room),
            seed=derive_seed(request),
            accepted_at=now,
            table=SequencePages(request.namespace),
            wishes=SamplingState.of(request),
        )
        self._next_id += 1
        self._live[sequence.id] = sequence
        self._by_key[key] = sequence
        self._waiting.append(sequence)
        return True

    def abort(self, request: str, attempt: int) -> None:
        """Flag a request for abortion; it ends in the next `schedule`, when no step is in flight."""
        sequence = self._by_key.get((request, attempt))
        if sequence is not None:
            sequence.aborted = True

    def take_finished(self) -> list[StreamRow]:
        """Last rows of requests that ended outside a step: aborted, or impossible from the start."""
        rows, self._finished_rows = self._finished_rows, []
        return rows

    def waiting_prefill_tokens(self) -> int:
        """Prompt tokens accepted and not yet scheduled."""
        return sum(sequence.pending for sequence in self._live.values() if sequence.pending > 1)

    def outstanding(self) -> dict[str, float]:
        """Priced work per tenant that is accepted and not served yet, by predicted output."""
        work: dict[str, float] = {}
        for sequence in self._live.values():
            request = sequence.request
            predicted = min(request.predicted_output_tokens, sequence.max_tokens)
            cost = self._prices.cost(
                computed_input=max(0, sequence.prompt_tokens - sequence.served),
                output=max(0, predicted - sequence.output_tokens),
            )
            work[request.tenant] = work.get(request.tenant, 0.0) + cost
        return work

    def live_sequences(self) -> dict[str, int]:
        """Running and waiting requests per tenant; tenants without any are left out."""
        live: dict[str, int] = {}
        for sequence in self._live.values():
            tenant = sequence.request.tenant
            live[tenant] = live.get(tenant, 0) + 1
        return live

    def tenant_pages(self) -> dict[str, int]:
        """KV pages in the tables of each tenant's running requests; a shared page counts in every table."""
        pages: dict[str, int] = {}
        for sequence in self._running:
            tenant = sequence.request.tenant
            pages[tenant] = pages.get(tenant, 0) + len(sequence.table.pages)
        return pages

    def tenant_prefill_tokens(self) -> dict[str, int]:
        """Prompt tokens accepted and not yet scheduled, per tenant."""
        tokens: dict[str, int] = {}
        for sequence in self._live.values():
            if sequence.pending > 1:
                tenant = sequence.request.tenant
                tokens[tenant] = tokens.get(tenant, 0) + sequence.pending
        return tokens

    def unclaimed_pages(self) -> int:
        """Pages that new requests may take: free or evictable, inside the utilization limit, and needed by no live
        request for the tokens that it has already."""
        claimed = sum(
            max(0, pages_for(len(sequence.token_ids) + 1) - len(sequence.table.pages))
            for sequence in self._live.values()
        )
        limit = int(self.config.kv_cache_utilization_limit * self.cache.total)
        return max(0, self.cache.available - (self.cache.total - limit) - claimed)

    def held_and_remaining(self) -> tuple[list[int], list[int]]:
        """KV tokens that each live request holds, or will once its known tokens are computed, and output to come."""
        live = self._live.values()
        return [len(s.token_ids) for s in live], [
            max(0, min(s.request.predicted_output_tokens, s.max_tokens) - s.output_tokens) for s in live
        ]

    def schedule(self, now: float, token_budget: int | None = None) -> StepRecord | None:
        """Choose the next step and move the state of its requests. None if nothing can be computed.

        `token_budget` bounds the tokens of this step, below `max_num_batched_tokens`; a step has at least one. The
        caller must run the record and `commit` it before the next call.
        """
        self._drop_aborted(now)
        if not self._live:
            return None
        budget = self.config.max_num_batched_tokens
        if token_budget is not None:
            budget = max(1, min(budget, token_budget))
        rows, budget, preempted = self._schedule_decodes(budget)
        if not preempted:
            self._admit(now)
        rows += self._schedule_prefills(budget, {sequence.id for sequence, _ in rows})
        if not rows:
            return None
        return self._advance(rows, now)

    def commit(self, record: StepRecord, result: StepResult, now: float) -> list[StreamRow]:
        """Apply the result of a record: share finished chunks, append tokens, end requests."""
        if result.step != record.step:
            raise ValueError(f"result of step {result.step} does not belong to record {record.step}")
        rows: list[StreamRow] = []
        sampled = 0
        logprobs = step_logprobs(record, result)
        for index in range(record.num_rows):
            last = bool(record.is_last_chunk[index])
            token, finite = (
                (int(result.token_ids[sampled]), bool(result.finite[sampled])) if last else (0, True)
            )
            sampled += last
            sequence = self._live.get(int(record.request[index]))
            if sequence is None or sequence.epoch != record.request_epoch[index]:
                continue
            length = int(record.length[index])
            end = int(record.start[index]) + length
            if length > 1 or end <= sequence.prompt_tokens:
                sequence.prefill_chunks.append(((now - sequence.accepted_at) * 1e3, length))
                self.cache.share(sequence.table, sequence.token_ids, end)
            if sequence.aborted:
                continue
            own = logprobs.get(index, NO_LOGPROBS)
            if own.prompt and sequence.wishes is not None:
                own = sequence.wishes.take_prompt(own, int(record.start[index]))
            if not finite or not own.finite:
                self.nonfinite_requests += 1
                rows.append(
                    self._finish(sequence, now, "error", error="the model returned non-finite logits")
                )
            elif last:
                row = self._append(sequence, token, now)
                rows.append(own.add_to(row) if own is not NO_LOGPROBS else row)
            elif own.prompt:
                rows.append(StreamRow(*sequence.key, token_ids=(), prompt_logprobs=own.prompt))
        return rows

    def _append(self, sequence: SequenceState, token: int, now: float) -> StreamRow:
        if sequence.max_tokens == 0:
            return self._finish(sequence, now, "length")
        sequence.token_ids.append(token)
        if sequence.wishes is not None:
            sequence.wishes.append(token)
        is_first = sequence.first_token_at is None
        if is_first:
            sequence.first_token_at = now
            self.first_tokens.append((sequence.request.ticket, sequence.request.attempt))
        sequence.last_token_at = now
        self._charge(sequence, self._prices.cost(output=1))
        if token in sequence.request.sampling.stop_token_ids:
            return self._finish(sequence, now, "stop", token_ids=(token,))
        if sequence.output_tokens >= sequence.max_tokens:
            return self._finish(sequence, now, "length", token_ids=(token,))
        return StreamRow(*sequence.key, token_ids=(token,), usage=sequence.usage() if is_first else None)

    def _finish(
        self,
        sequence: SequenceState,
        now: float,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        error: str | None = None,
    ) -> StreamRow:
        if reason in ("stop", "length"):
            self.completed.append((sequence.request.ticket, sequence.request.attempt))
        if sequence.table.pages and reason != "error":
            self.cache.share(sequence.table, sequence.token_ids, sequence.computed)
        self.cache.close(sequence.table)
        del self._live[sequence.id]
        del self._by_key[sequence.key]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        return StreamRow(
            *sequence.key,
            token_ids=token_ids,
            finish_reason=reason,
            error=error,
            usage=sequence.usage(),
            timings=sequence.timings(now),
        )

    def _drop_aborted(self, now: float) -> None:
        for sequence in [sequence for sequence in self._live.values() if sequence.aborted]:
            self._finished_rows.append(self._finish(sequence, now, "abort"))

    def _schedule_decodes(self, budget: int) -> tuple[list[tuple[SequenceState, int]], int, bool]:
        """One row per decoding request, as far as budget and pages go. Returns rows, budget left, preempted?"""
        decoding = [sequence for sequence in self._running if sequence.pending == 1]
        limit = max(1, budget - prefill_floor(budget, self.waiting_prefill_tokens()))
        if len(decoding) > limit:
            # Whoever decodes now goes to the end, so that everybody has a turn.
            decoding = decoding[:limit]
            turn = {sequence.id for sequence in decoding}
            self._running = [sequence for sequence in self._running if sequence.id not in turn] + decoding
        rows: list[tuple[SequenceState, int]] = []
        victims: set[int] = set()
        for sequence in decoding:
            while sequence.id not in victims:
                if self.cache.reserve(sequence.table, sequence.computed + 1):
                    rows.append((sequence, 1))
                    break
                victim = self._choose_victim()
                self._preempt(victim)
                victims.add(victim.id)
        rows = [row for row in rows if row[0].id not in victims]
        return rows, budget - len(rows), bool(victims)

    def _admit(self, now: float) -> None:
        """Move waiting requests into the running set while slots and pages last, strictly in order."""
        limit = int(self.config.kv_cache_utilization_limit * self.cache.total)
        unreserved = sum(
            max(0, pages_for(len(sequence.token_ids)) - len(sequence.table.pages))
            for sequence in self._running
        )
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            namespace = sequence.request.namespace
            if sequence.wants_prompt_logits:
                table = SequencePages(namespace)
            else:
                table = self.cache.open(namespace, sequence.token_ids)
            needed = pages_for(len(sequence.token_ids) + 1) - len(table.pages)
            room = self.cache.available - (self.cache.total - limit) - unreserved
            if needed > room and not (not self._running and needed <= self.cache.available):
                self.cache.close(table)
                return
            self._waiting.popleft()
            self._running.append(sequence)
            unreserved += needed
            sequence.table = table
            sequence.computed = len(table.pages) * PAGE_SIZE
            if not sequence.admitted:
                sequence.admitted = True
                sequence.scheduled_at = now
                sequence.cached_input = sequence.served = sequence.computed
                self.cached_tokens += sequence.computed
                self._charge(sequence, self._prices.cost(cached_input=sequence.computed))

    def _schedule_prefills(self, budget: int, scheduled: set[int]) -> list[tuple[SequenceState, int]]:
        """Split the budget among tenants by weight; inside a tenant, in order of arrival."""
        queues: dict[str, list[SequenceState]] = {}
        for sequence in sorted(self._running, key=lambda sequence: sequence.id):
            if sequence.pending > 1 or (sequence.id not in scheduled and not sequence.output_tokens):
                queues.setdefault(sequence.request.tenant, []).append(sequence)
        if not queues or budget <= 0:
            return []
        chunk = self.config.prefill_chunk_size
        shares = split_prefill_budget(
            {tenant: sum(min(chunk, s.pending) for s in queue) for tenant, queue in queues.items()},
            {tenant: queue[0].request.weight for tenant, queue in queues.items()},
            budget,
            self.step,
        )
        rows: list[tuple[SequenceState, int]] = []
        prompt_logits = MAX_PROMPT_LOGITS
        for tenant, queue in queues.items():
            share = shares.get(tenant, 0)
            for sequence in queue:
                length = min(chunk, sequence.pending, share)
                if length <= 0:
                    break
                if sequence.wants_prompt_logits:
                    length = min(length, prompt_logits)
                    prompt_logits -= length
                    if length <= 0:
                        continue
                if not self.cache.reserve(sequence.table, sequence.computed + length):
                    continue  # the pages went to decodes; try again when one of them ends
                rows.append((sequence, length))
                share -= length
        if not rows and not scheduled:
            # Half-computed prompts hold every page between them and no decode will free any.
            self._preempt(self._choose_victim())
            return self._schedule_prefills(budget, scheduled)
        return rows

    def _advance(self, rows: list[tuple[SequenceState, int]], now: float) -> StepRecord:
        """Move every scheduled request and write the record: the only place where `computed` grows."""
        token_ids: list[int] = []
        page_indices: list[int] = []
        token_indptr, page_indptr = [0], [0]
        starts, lengths, last = [], [], []
        sampled: list[SequenceState] = []
        prompts: list[tuple[int, SamplingState, list[int]]] = []
        self.prefill_chunks = [
            length for sequence, length in rows if length > 1 or sequence.computed < sequence.prompt_tokens
        ]
        for row, (sequence, length) in enumerate(rows):
            start, end = sequence.computed, sequence.computed + length
            if sequence.wishes is not None and sequence.wants_prompt_logits:
                prompts.append(
                    (row, sequence.wishes, following(sequence.request.prompt_token_ids, start, end))
                )
            starts.append(start)
            lengths.append(length)
            last.append(end == len(sequence.token_ids))
            if last[-1]:
                sampled.append(sequence)
            token_ids += sequence.token_ids[start:end]
            token_indptr.append(len(token_ids))
            page_indices += sequence.table.pages[: pages_for(end)]
            page_indptr.append(len(page_indices))
            self._count_input(sequence, start, end)
            sequence.computed = end
        self.step += 1
        return StepRecord(
            epoch=self.epoch,
            step=self.step,
            request=np.array([sequence.id for sequence, _ in rows], np.int32),
            request_epoch=np.array([sequence.epoch for sequence, _ in rows], np.int32),
            start=np.array(starts, np.int32),
            length=np.array(lengths, np.int32),
            is_last_chunk=np.array(last, np.bool_),
            token_ids=np.array(token_ids, np.int32),
            token_indptr=np.array(token_indptr, np.int32),
            page_indices=np.array(page_indices, np.int32),
            page_indptr=np.array(page_indptr, np.int32),
            sampling=_sampling_columns(sampled),
            prompt_logprobs=prompt_columns(prompts),
        )

    def _count_input(self, sequence: SequenceState, start: int, end: int) -> None:
        """Charge prompt tokens computed for the first time; count chunks that are computed again."""
        if start < sequence.served:
            self.recomputed_chunks += 1
        fresh = max(0, min(end, sequence.prompt_tokens) - max(start, sequence.served))
        if fresh:
            self.computed_tokens += fresh
            self._charge(sequence, self._prices.cost(computed_input=fresh))
        sequence.served = max(sequence.served, end)

    def _charge(self, sequence: SequenceState, cost: float) -> None:
        tenant = sequence.request.tenant
        self.served[tenant] = self.served.get(tenant, 0.0) + cost

    def _choose_victim(self) -> SequenceState:
        candidates = [
            VictimCandidate(
                id=sequence.id,
                tenant=sequence.request.tenant,
                weight=sequence.request.weight,
                pages=len(sequence.table.pages),
                uncached_tokens=sequence.computed - sequence.table.shared * PAGE_SIZE,
                arrival_order=sequence.id,
            )
            for sequence in self._running
        ]
        return self._live[choose_victim(candidates).id]

    def _preempt(self, sequence: SequenceState) -> None:
        """Take a running request's pages; it waits in front and computes its tokens again."""
        self.cache.share(sequence.table, sequence.token_ids, sequence.computed)
        self.cache.close(sequence.table)
        sequence.computed = 0
        sequence.epoch += 1
        sequence.preemptions += 1
        self.preemptions += 1
        self._running.remove(sequence)
        position = next(
            (i for i, other in enumerate(self._waiting) if other.id > sequence.id), len(self._waiting)
        )
        self._waiting.insert(position, sequence)

    def _remember(self, key: tuple[str, int]) -> None:
        self._recent[key] = None
        if len(self._recent) > _REMEMBERED_REQUESTS:
            self._recent.popitem(last=False)


def _sampling_columns(sampled: list[SequenceState]) -> SamplingColumns:
    params = [sequence.request.sampling for sequence in sampled]
    columns = SamplingColumns(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        seed=np.array([sequence.seed for sequence in sampled], np.uint64),
        position=np.array([len(sequence.token_ids) for sequence in sampled], np.int32),
    )
    wishes = [(row, sequence.wishes) for row, sequence in enumerate(sampled) if sequence.wishes is not None]
    return with_wishes(columns, wishes)
