"""Iteration-level scheduler: which tokens of which requests the next step computes.

Torch-free and clock-free: time comes in as an argument, so a simulator can drive it. One cycle is

    record = scheduler.schedule(now)        state moves here, once
    result = runner.run(record)
    rows = scheduler.commit(record, result, now)

Decode rows come first, prefill in chunks fills the rest of the token budget (Agrawal et al., "Sarathi-Serve",
OSDI'24). A result is matched to its record by request id and epoch; an abort is a flag that is acted on between
steps, so a page is never freed while a record in flight names it.

A second `schedule` may come before the `commit` of the first: the scheduler then presumes that every request the first
one samples for goes on with a token yet unknown. Where one does not, its row of the second record is dropped. What
can not be decided before the first result is known (an abort, a preemption, penalties over the output) waits for it:
`schedule` answers None. Answers, accounts and cached pages are the same as with one step at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_actor.admission import Admission
from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.cache import KVCache, SequencePages, pages_for
from engine_actor.live import LiveRequests
from engine_actor.prefill import Prefill
from engine_actor.record import write_record
from engine_actor.request import EngineRequest, FinishReason, RequestUsage, StreamRow
from engine_actor.running import RunningSet
from engine_actor.sampling.state import SamplingState, step_logprobs
from engine_actor.scheduler_state import SchedulerState
from engine_actor.sequence import SequenceState, derive_seed
from engine_actor.service import ServiceAccounts
from engine_actor.step import StepRecord, StepResult
from engine_actor.tenant import Tenant
from policies.engine_shares import EngineShares
from policies.memory import VictimCandidate, choose_victim
from policies.service import DEFAULT_PRICES, ServicePrices
from policies.step_budget import prefill_floor

_UNREPORTED_EVENTS = 10_000
_NO_TOKEN, _NOT_FINITE = -1, -2


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one engine. `prefill_chunk_size` is the upper bound of one request's tokens in one step.

    `kv_cache_utilization_limit` is the share of the pool that the estimated peak of the admitted requests may take,
    `kv_watermark` the share that an admission leaves available for those that already run. With `async_scheduling` the
    step loop schedules each step while the one before runs.

    Two habits of older engines, for comparison: `request_level_batching` starts the next requests only when all before
    them have ended (what Orca, OSDI'22, did away with); `prefill_first` leaves decodes out of a step that has prompts
    to compute (vLLM before chunked prefill).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_chunk_size: int
    kv_cache_utilization_limit: float = 1.0
    prefix_caching: bool = True
    kv_watermark: float = 0.01
    async_scheduling: bool = False
    request_level_batching: bool = False
    prefill_first: bool = False


class _StepInFlightError(Exception):
    """What is to be done has to wait for the result of a step."""


class Scheduler:
    """Owns the live requests and their pages. Not thread-safe: one thread drives it.

    Invariants:
    - a request either waits or runs; only running ones hold a slot and pages;
    - the oldest running request of all is never preempted for pages, the last running one of a tenant never for
      another tenant; inside a tenant requests start in order of arrival. So at any time some request only moves
      forward, and each waiting one has finitely many before it: every request ends;
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
        self.preemptions = 0
        self.nonfinite_requests = 0
        self.service = ServiceAccounts(prices)
        self._next_id = 0
        self._live = LiveRequests()
        longest = min(config.max_model_len, self.cache.total * PAGE_SIZE)
        self._running = RunningSet(self.cache, config.max_num_seqs, pages_for(longest))
        self._admission = Admission(
            self.cache,
            self._running,
            utilization_limit=config.kv_cache_utilization_limit,
            watermark=config.kv_watermark,
        )
        self._prefill = Prefill(
            self._live,
            self._running,
            self.cache,
            self.service,
            chunk_size=config.prefill_chunk_size,
        )
        self.state = SchedulerState(
            self._live, self._running, self.cache, self.service, config.kv_cache_utilization_limit
        )
        self._aborted: list[SequenceState] = []
        self._in_flight: deque[int] = deque()  # steps scheduled and not committed
        self._prefilled: list[SequenceState] = []  # those with chunks in the step scheduled last
        self._finished_rows: list[StreamRow] = []
        self.first_tokens: deque[tuple[str, int]] = deque(maxlen=_UNREPORTED_EVENTS)
        """Tickets of sequences whose first token came in the commits so far. Whoever reports them empties it."""
        self.completed: deque[tuple[str, int]] = deque(maxlen=_UNREPORTED_EVENTS)
        """Tickets of sequences that ended by themselves, in the same way."""

    @property
    def served(self) -> dict[str, float]:
        """Priced service so far per tenant."""
        return self.service.served

    @property
    def running(self) -> Sequence[SequenceState]:
        """The requests that hold pages. Not to be changed."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._finished_rows or self._in_flight)

    def submit(self, request: EngineRequest, now: float) -> bool:
        """Take a request; False if this (request, attempt) was taken before.

        A request that can never run ends at once: its last row, with the reason, comes from the next `schedule`.
        """
        key = (request.request, request.attempt)
        if not self._live.remember(key):
            return False
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
            tenant=self._live.tenant(request.tenant, request.weight, request.kv_share),
            token_ids=list(request.prompt_token_ids),
            max_tokens=min(request.sampling.max_tokens, room),
            seed=derive_seed(request),
            accepted_at=now,
            table=SequencePages(request.namespace),
            wishes=SamplingState.of(request),
        )
        self._next_id += 1
        self._live.add(sequence)
        return True

    def abort(self, request: str, attempt: int) -> None:
        """Flag a request for abortion; it ends in the next `schedule` that finds no step in flight."""
        sequence = self._live.find((request, attempt))
        if sequence is not None and not sequence.aborted:
            sequence.aborted = True
            self._aborted.append(sequence)

    def take_finished(self) -> list[StreamRow]:
        """Last rows of requests that ended outside a step: aborted, or impossible from the start."""
        rows, self._finished_rows = self._finished_rows, []
        return rows

    def schedule(self, now: float, token_budget: int | None = None) -> StepRecord | None:
        """Choose the next step and move the state of its requests. None if nothing can be computed, or not before the
        step in flight is committed.

        `token_budget` bounds the tokens of this step, below `max_num_batched_tokens`; a step has at least one. The
        caller must run the records and `commit` them in their order, one call behind at most.
        """
        if len(self._in_flight) > 1:
            raise ValueError("two steps are in flight: commit the first")
        if self._in_flight and (self._aborted or self._running.any_needs_result()):
            return None
        try:
            return self._schedule(now, token_budget)
        except _StepInFlightError:
            return None

    def _schedule(self, now: float, token_budget: int | None) -> StepRecord | None:
        for sequence in self._aborted:
            if sequence.id in self._live.by_id:
                self._finished_rows.append(self._finish(sequence, now, "abort"))
        self._aborted.clear()
        if not self._live:
            return None
        budget = self.config.max_num_batched_tokens
        if token_budget is not None:
            budget = max(1, min(budget, token_budget))
        decodes, preempted = self._schedule_decodes(budget)
        if not preempted and not (self.config.request_level_batching and len(self._running)):
            decodes = self._admit(now, decodes)
        left = budget if self.config.prefill_first else budget - len(decodes)
        prefills = self._schedule_prefills(left, decodes)
        if self.config.prefill_first and prefills:
            decodes = decodes[:0]
        if not len(decodes) and not prefills:
            return None
        return self._advance(decodes, prefills)

    def commit(self, record: StepRecord, result: StepResult, now: float) -> list[StreamRow]:
        """Apply the result of a record: share finished chunks, append tokens, end requests."""
        if not self._in_flight or not self._in_flight[0] == record.step == result.step:
            raise ValueError(
                f"record {record.step} with result {result.step} is not the oldest step in flight"
            )
        self._in_flight.popleft()
        self.cache.settle(in_flight=bool(self._in_flight))
        rows: list[StreamRow] = []
        live, logprobs = self._live.by_id, step_logprobs(record, result)
        sampled: dict[Tenant, int] = {}
        for row, (request_id, epoch, token) in enumerate(
            zip(record.request.tolist(), record.request_epoch.tolist(), _tokens(record, result), strict=True)
        ):
            sequence = live.get(request_id)
            if sequence is None or sequence.epoch != epoch:
                continue
            if row >= record.num_decodes:
                length = int(record.length[row])
                sequence.prefill_chunks.append(((now - sequence.accepted_at) * 1e3, length))
                self._running.share(sequence, int(record.start[row]) + length)
            if sequence.aborted:
                continue
            own = logprobs.get(row) if logprobs else None
            if own is not None:
                if own.prompt and sequence.wishes is not None:
                    own = sequence.wishes.take_prompt(own, int(record.start[row]))
                if not own.finite:
                    token = _NOT_FINITE
            if token == _NOT_FINITE:
                self.nonfinite_requests += 1
                error = "the model returned non-finite logits"
                rows.append(self._finish(sequence, now, "error", error=error))
                continue
            if token == _NO_TOKEN:
                if own is not None and own.prompt:
                    rows.append(StreamRow(*sequence.key, token_ids=(), prompt_logprobs=own.prompt))
                continue
            if sequence.max_tokens:
                tenant = sequence.tenant
                sampled[tenant] = sampled.get(tenant, 0) + 1
                new = self._append(sequence, token, now)
            else:
                new = self._finish(sequence, now, "length")
            rows.append(new if own is None else own.add_to(new))
        self.service.output(sampled)
        return rows

    def _append(self, sequence: SequenceState, token: int, now: float) -> StreamRow:
        sequence.token_ids.append(token)
        sequence.last_token_at = now
        if sequence.wishes is not None:
            sequence.wishes.append(token)
        usage = None if sequence.first_token_at is not None else self._note_first_token(sequence, now)
        if token in sequence.stop_token_ids:
            return self._finish(sequence, now, "stop", token_ids=(token,))
        if len(sequence.token_ids) >= sequence.max_length:
            return self._finish(sequence, now, "length", token_ids=(token,))
        request, attempt = sequence.key
        return StreamRow(request, attempt, (token,), None, None, usage)

    def _note_first_token(self, sequence: SequenceState, now: float) -> RequestUsage:
        """Returns the usage so far."""
        sequence.first_token_at = now
        self.first_tokens.append((sequence.request.ticket, sequence.request.attempt))
        return sequence.usage()

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
        self._live.remove(sequence)
        if sequence.slot >= 0:
            self._running.remove(sequence, keep=reason != "error" and self.cache.prefix_caching)
        self._running.forget(sequence)
        return StreamRow(
            *sequence.key,
            token_ids=token_ids,
            finish_reason=reason,
            error=error,
            usage=sequence.usage(),
            timings=sequence.timings(now),
        )

    def _schedule_decodes(self, budget: int) -> tuple[np.ndarray, bool]:
        """Slots of the requests that decode in this step, as far as budget and pages go; preempted any?"""
        running = self._running
        slots = running.decode_turn(max(1, budget - prefill_floor(budget, self._live.prefill_tokens)))
        preempted = False
        for slot in running.without_page(slots):
            sequence = running.sequences[slot]
            while sequence is not None and sequence.slot == slot:
                if running.reserve(sequence, sequence.computed + 1):
                    break
                self._preempt(self._choose_victim())
                preempted = True
        return (slots[running.decoding[slots]] if preempted else slots), preempted

    def _admit(self, now: float, decodes: np.ndarray) -> np.ndarray:
        """Start waiting requests while slots and pages last, reclaiming both for tenants under their share.

        `decodes` are the slots of this step's decode rows; returns those that are left.
        """
        reclaimed = False
        while self.num_waiting:
            shares = self._shares()
            name = shares.next_waiting()
            if name is None:  # all tenants that wait are at their caps
                break
            sequence = self._live.tenants[name].waiting[0]
            if not self._running.has_free_slot:
                giver = shares.reclaim_from(name, slot=True)
            elif self._admission.waits_for_spread(sequence, self.step) and not shares.reclaim_from(
                name, slot=False
            ):
                break
            else:
                table = self._running.open(sequence)
                if self._admission.fits(sequence, table, self.step):
                    self._start(sequence, table, now)
                    continue
                self.cache.close(table, used=False)
                giver = shares.reclaim_from(name, slot=False)
            if giver is None:
                break
            self._preempt(self._live.by_id[max(self._live.tenants[giver].running)])
            reclaimed = True
        return decodes[self._running.decoding[decodes]] if reclaimed else decodes

    def _shares(self) -> EngineShares:
        uses = {name: tenant.use() for name, tenant in self._live.tenants.items()}
        return EngineShares(uses, self.config.max_num_seqs, self.cache.total)

    def _start(self, sequence: SequenceState, table: SequencePages, now: float) -> None:
        sequence.tenant.start(sequence)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
        self._prefill.skip_to(sequence, table.shared * PAGE_SIZE)
        self._running.add(sequence, table)

    def _schedule_prefills(self, budget: int, decodes: np.ndarray) -> list[tuple[SequenceState, int]]:
        if budget <= 0:
            return []
        beside = decodes[:0] if self.config.prefill_first else decodes
        rows = self._prefill.rows(budget, self.step, self._prefilled, beside)
        while not rows and not len(decodes) and len(self._running):
            # Half-computed prompts hold every page between them and no decode will free any.
            self._preempt(self._choose_victim())
            rows = self._prefill.rows(budget, self.step, self._prefilled, beside)
        return rows

    def _advance(self, decodes: np.ndarray, prefills: list[tuple[SequenceState, int]]) -> StepRecord:
        """Move every scheduled request and write the record: the only place where `computed` grows by computing."""
        self.step += 1
        self._in_flight.append(self.step)
        self.cache.in_flight = True
        for sequence, length in prefills:
            self.service.computed(sequence, sequence.computed, sequence.computed + length)
            self._live.count_prefill(sequence.tenant, -length)
        record = write_record(self.epoch, self.step, self._running, decodes, prefills)
        self._prefilled = [sequence for sequence, _ in prefills]
        for sequence in self._prefilled:
            if not sequence.pending:
                sequence.tenant.prefilling.remove(sequence)
                self._running.start_decoding(sequence)
        return record

    def _choose_victim(self) -> SequenceState:
        shares = self._shares()
        candidates = [
            VictimCandidate(
                id=sequence.id,
                tenant=sequence.tenant.name,
                share=shares.page_share(sequence.tenant.name),
                pages=len(sequence.table.pages),
                uncached_tokens=sequence.computed - sequence.table.shared * PAGE_SIZE,
                arrival_order=sequence.id,
            )
            for sequence in self._running
        ]
        return self._live.by_id[choose_victim(candidates).id]

    def _preempt(self, sequence: SequenceState) -> None:
        """Take a running request's slot and pages; it waits in front and computes again what is lost meanwhile.

        Its full pages stay in the prefix cache as long as nobody needs them: tails are evicted first, so no more is
        computed again than was taken. Raises _StepInFlightError while it may be part of a step.
        """
        if self._in_flight:
            raise _StepInFlightError
        sequence.served = max(sequence.served, sequence.computed)
        tenant = sequence.tenant
        self._live.count_prefill(
            tenant, len(sequence.token_ids) - (0 if sequence.decoding else sequence.pending)
        )
        tenant.leave(sequence)
        self._running.remove(sequence, keep=True)
        sequence.computed = 0
        sequence.epoch += 1
        sequence.preemptions += 1
        self.preemptions += 1
        tenant.queue(sequence)


def _tokens(record: StepRecord, result: StepResult) -> list[int]:
    """The sampled token of each row of the record, _NO_TOKEN where none was, _NOT_FINITE where the logits were not."""
    tokens = np.full(record.num_rows, _NO_TOKEN)
    tokens[record.is_last_chunk] = np.where(result.finite, result.token_ids, _NOT_FINITE)
    listed: list[int] = tokens.tolist()
    return listed
