"""The life of one inference request, in order:

1 key -> tenant · 2 validate, render, tokenise · 3 reserve quota · 4 wait for entry · 5 submit ·
6, 7 the engine steps and sends · 8 text and answer · 9 settle, record.

A request can end anywhere. Whatever happens, the engine stops working for it, its hold is settled or voided, and it
is recorded exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from engine_actor.executor import PAGE_SIZE
from engine_actor.request import EngineRequest, RequestUsage
from policies.page_hashes import page_hashes
from policies.tickets import Grant, Refusal, Ticket
from serve_app.api.endpoints import ParsedRequest
from serve_app.api.errors import ApiError
from serve_app.api.responses import Usage
from serve_app.channel import Delivery, EngineChannel, EngineLostError, GrantVoidError, Mailbox
from serve_app.connection import Connection
from serve_app.idempotent import Repeatable
from serve_app.pool import ModelPool, QueueGoneError
from serve_app.quota_answers import fit_lengths, quota_error, rate_headers
from serve_app.sequence import Sequence, TextEvent
from serve_app.stream_events import StreamEvents
from serve_app.targets import ADMISSION_HEADER, Targets, elapsed_when_asked, refusal_error
from serve_app.telemetry.records import EngineTimings, Outcome, RequestRecord
from tenancy.directory import Identity
from tenancy.quota import Demand, Hold, QuotaRefusal, QuotaStore, QuotaUnavailable, Used

logger = logging.getLogger(__name__)

MAX_RUNS = 2
"""Times a request is given to an engine: once more when it was lost before a byte was sent."""

HEARTBEAT_SECONDS = 15.0
_HEARTBEAT = b": heartbeat\n\n"
_LAST_ROWS_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 0.05


class RequestLife:
    """Steps 2 to 9 of one authenticated request."""

    def __init__(
        self,
        record: RequestRecord,
        identity: Identity,
        pool: ModelPool,
        quota: QuotaStore,
        namespace: str,
        parsed: ParsedRequest,
        targets: Targets,
        waiting_timeout_seconds: float,
    ) -> None:
        self.record = record
        self.id = uuid.uuid4().hex
        self._identity = identity
        self._tenant = identity.tenant
        self._pool = pool
        self._quota = quota
        self._namespace = namespace
        self._parsed = parsed
        self._targets = targets
        self._waiting_timeout = waiting_timeout_seconds
        self.headers: dict[str, str] = {}
        """Response headers, for an answer and for an error alike."""
        self.idempotency: Repeatable | None = None
        self.replayed = False
        """The answer was that of an earlier request: nothing was run."""
        self._hold: Hold | None = None
        self._channel: EngineChannel | None = None
        self._mailbox: Mailbox | None = None
        self._sequences = [
            Sequence(index, parsed, pool.text) for index in range(len(parsed.prompts) * parsed.n)
        ]
        record.sequences = len(self._sequences)
        record.stream = parsed.stream
        record.ttft_target_ms, record.deadline_ms = targets.ttft_ms, targets.deadline_ms

    @property
    def complete(self) -> bool:
        """Every choice has ended by itself."""
        return all(sequence.finish_reason is not None for sequence in self._sequences)

    @property
    def hold(self) -> Hold | None:
        """The live reservation, for lease renewal."""
        return self._hold

    def usage(self) -> Usage:
        """Tokens used so far, as the API reports them: each prompt counts once, however many choices it has."""
        n = self._parsed.n
        prompts = self._sequences[::n]
        return Usage(
            prompt_tokens=sum(len(sequence.prompt) for sequence in prompts),
            completion_tokens=sum(sequence.output_tokens for sequence in self._sequences),
            cached_tokens=sum(sequence.usage.cached_input for sequence in prompts),
        )

    async def reserve(self) -> None:
        """Step 3. Raises ApiError 400, 429 or 503; then nothing has been taken."""
        self._parsed = fit_lengths(
            self._parsed,
            self._tenant,
            self._pool.model,
            self._targets.service_class,
            self._identity.limits,
        )
        longest = self._pool.output_lengths.of(self._tenant.id).bound(self._parsed.max_tokens)
        demand = Demand(
            request_id=self.record.request,
            model=self._pool.model,
            service_class=self._targets.service_class,
            slots=len(self._sequences),
            input_tokens=self.usage().prompt_tokens,
            output_tokens=longest * len(self._sequences),
        )
        try:
            outcome = await self._quota.reserve(
                self._tenant, demand, key_id=self._identity.key_id, key_limits=self._identity.limits
            )
        except QuotaUnavailable:
            raise ApiError(
                "quota_store_unavailable", "The quota store does not answer. Try again shortly."
            ) from None
        self.record.reserved_ms = self.record.now_ms()
        self.headers.update(rate_headers(outcome))
        if isinstance(outcome, QuotaRefusal):
            raise quota_error(outcome)
        self._hold = outcome

    async def respond(self, connection: Connection) -> None:
        """Steps 4 to 8. The status line is withheld until the engine has the request. Raises ApiError."""
        if self._parsed.stream:
            await self._stream_answer(connection)
        else:
            await self._whole_answer(connection)

    async def _whole_answer(self, connection: Connection) -> None:
        async for _ in self._events(on_entry=None):
            pass
        choices = [sequence.choice() for sequence in self._sequences]
        await connection.send_json(200, self._parsed.builder.full(choices, self.usage()), self.headers)

    async def _stream_answer(self, connection: Connection) -> None:
        stream = StreamEvents(self._parsed.builder)

        async def on_entry() -> None:
            if connection.status is None:
                await connection.start_stream(self.headers)

        async for events in self._events(on_entry):
            await connection.send_event(stream.encode(events, self.usage) if events else _HEARTBEAT)
        await connection.send_event(stream.end(self.usage()))
        await connection.end_stream()

    async def _events(self, on_entry: Callable[[], Awaitable[None]] | None) -> AsyncIterator[list[TextEvent]]:
        """Text as it comes, an empty list as a heartbeat. Runs the request again once if nothing was sent yet."""
        asked_at = time.monotonic()
        sent = False
        runs = 0
        while True:
            self.record.new_attempt(self.record.now_ms())
            grant = await self._enter(asked_at)
            runs += 1
            try:
                mailbox = await self._submit(grant)
                if on_entry is not None:
                    await on_entry()  # the engine is at work meanwhile
                while not self.complete:
                    delivery = await mailbox.get(HEARTBEAT_SECONDS)
                    events = [] if delivery is None else self._take(delivery)
                    if events or delivery is None:
                        sent = sent or (bool(events) and self._parsed.stream)
                        yield events
                return
            except GrantVoidError:
                runs -= 1  # the engine never had it
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
            except EngineLostError:
                if sent or runs >= MAX_RUNS:
                    raise ApiError(
                        "engine_unavailable", "The engine was lost while it answered this request."
                    ) from None
                logger.info("request %s is run again: its engine was lost", self.id)
                for sequence in self._sequences:
                    sequence.restart()

    async def _enter(self, asked_at: float) -> Grant:
        """Step 4: wait for this tenant's turn."""
        n_in = sum(len(sequence.prompt) for sequence in self._sequences)
        predicted = self._pool.output_lengths.of(self._tenant.id).expected(self._parsed.max_tokens)
        elapsed_ms = elapsed_when_asked(self.record.now_ms(), asked_at)
        ticket = Ticket(
            request=self.id,
            attempt=self.record.attempts,
            tenant=self._tenant.id,
            weight=self._tenant.weight,
            kv_share=self._tenant.kv_share,
            input_tokens=n_in,
            predicted_output_tokens=predicted * len(self._sequences),
            sequences=len(self._sequences),
            service_class=self._targets.service_class,
            page_hashes=self._page_hashes(),
        )
        longest = self._pool.output_lengths.of(self._tenant.id).bound(self._parsed.max_tokens)
        ticket = self._targets.put_on(ticket, elapsed_ms=elapsed_ms, output_tokens_bound=longest)
        try:
            answer = await self._pool.ask_for_entry(ticket, asked_at, self._waiting_timeout)
        except QueueGoneError:
            raise ApiError("engine_unavailable", "No engine is available. Try again shortly.") from None
        except BaseException:
            self._pool.queue.withdraw(ticket)
            raise
        if isinstance(answer, Refusal):
            raise refusal_error(answer, elapsed_ms)
        self.record.granted_ms = self.record.now_ms()
        self.record.admission = self._targets.admission(answer)
        if self.record.admission is not None:
            self.headers[ADMISSION_HEADER] = self.record.admission
        if answer.predicted_ttft_ms is not None:
            self.record.predicted_first_token_ms = elapsed_ms + answer.predicted_ttft_ms
        return answer

    async def _submit(self, grant: Grant) -> Mailbox:
        """Step 5: hand the token ids to the engine that the grant names; its rows come to the mailbox."""
        channel = self._channel = self._pool.channels[grant.engine]
        self._mailbox = None
        predicted = self._pool.output_lengths.of(self._tenant.id).expected(self._parsed.max_tokens)
        requests = [
            EngineRequest(
                request=f"{self.id}/{sequence.index}",
                attempt=grant.attempt,
                ticket=self.id,
                tenant=self._tenant.id,
                prompt_token_ids=sequence.prompt,
                sampling=sequence.sampling(self._parsed.sampling),
                namespace=self._namespace,
                weight=self._tenant.weight,
                kv_share=self._tenant.kv_share,
                predicted_output_tokens=predicted,
                queue_epoch=grant.queue_epoch,
                tpot_ms=self._targets.tpot_ms,
                itl_ms=self._targets.itl_ms,
            )
            for sequence in self._sequences
        ]
        self._mailbox = await channel.submit(requests, grant.attempt, grant.engine_epoch)
        self.record.engine = grant.engine
        self.record.submitted_ms = self.record.now_ms()
        return self._mailbox

    def _take(self, delivery: Delivery) -> list[TextEvent]:
        """Steps 6 to 8: turn the rows of a step into text. Raises ApiError, EngineLostError."""
        assert self._channel is not None
        events: list[TextEvent] = []
        for row in delivery.rows:
            sequence = self._sequences[int(row.request.rpartition("/")[2])]
            if sequence.finish_reason is not None:
                continue
            sequence.usage = row.usage or sequence.usage
            if row.timings is not None:
                self.record.engine_timings.append(
                    EngineTimings(delivery.wall_time_ns, row.timings, sequence.index)
                )
            if row.finish_reason == "error":
                raise ApiError("internal_error", "The engine could not compute this request.")
            if row.finish_reason == "abort":
                raise EngineLostError("the engine gave the request up")
            event = sequence.take(row)
            if row.finish_reason is None and sequence.stopped:
                self._channel.abort([(row.request, row.attempt)])
            if row.token_ids:
                self.record.token_sent(self.record.now_ms(), sequence.index)
            if event is not None:
                events.append(event)
        return events

    # Step 9 -----------------------------------------------------------------------------------------------------

    async def finish(self, outcome: Outcome, *, used: bool) -> None:
        """End the engine's work, settle what was used (or void the hold), and add the usage to the record."""
        accounted = True
        if self._mailbox is not None and self._channel is not None:
            if not self.complete:
                accounted = await self._stop_engine()
            self._channel.close(self._mailbox)
        if self.complete and self._parsed.max_tokens:
            for sequence in self._sequences:
                self._pool.output_lengths.observe(self._tenant.id, sequence.output_tokens)
        record = self.record
        record.usage = RequestUsage(
            computed_input=sum(s.usage.computed_input for s in self._sequences),
            cached_input=sum(s.usage.cached_input for s in self._sequences),
            output=sum(s.output_tokens for s in self._sequences),
        )
        record.finish_reasons = [s.finish_reason for s in self._sequences if s.finish_reason is not None]
        hold, self._hold = self._hold, None
        if hold is None:
            return
        if not used:
            await self._quota.void(hold)
            return
        record.billed = billed = self._billed(whole_prompts=outcome == "cancelled" and not accounted)
        timings = {"queue": record.queue_ms, "first_token": record.first_token_ms, "total": record.now_ms()}
        await self._quota.settle(
            hold,
            Used(
                billed.prompt_tokens,
                billed.cached_tokens,
                billed.completion_tokens,
                outcome,
                {name: round(ms, 3) for name, ms in timings.items() if ms is not None},
            ),
        )

    def _billed(self, *, whole_prompts: bool) -> Usage:
        """What the tenant is charged: of a whole answer the usage it was told, else prompts as far as they were
        processed and the tokens that were generated. `whole_prompts` where the engine could not say how far."""
        usage = self.usage()
        if self.complete:
            return usage
        n, prompt_tokens = self._parsed.n, 0
        for first in range(0, len(self._sequences), n):
            choices = self._sequences[first : first + n]
            length = len(choices[0].prompt)
            if not whole_prompts and not any(choice.output_tokens for choice in choices):
                length = min(length, max(c.usage.computed_input + c.usage.cached_input for c in choices))
            prompt_tokens += length
        return Usage(prompt_tokens, usage.completion_tokens, min(usage.cached_tokens, prompt_tokens))

    async def _stop_engine(self) -> bool:
        """Abort what is left and wait shortly for the last rows: they tell what was really computed. Whether all
        of them came."""
        assert self._mailbox is not None and self._channel is not None
        self._channel.abort([(f"{self.id}/{s.index}", self._mailbox.attempt) for s in self._sequences])
        waiting = {s.index for s in self._sequences if s.finish_reason is None}
        deadline = time.monotonic() + _LAST_ROWS_SECONDS
        try:
            while waiting:
                delivery = await self._mailbox.get(max(0.0, deadline - time.monotonic()))
                if delivery is None:
                    break
                for row in delivery.rows:
                    sequence = self._sequences[int(row.request.rpartition("/")[2])]
                    if sequence.finish_reason is None:
                        sequence.count(row)
                    if row.timings is not None:
                        self.record.engine_timings.append(
                            EngineTimings(delivery.wall_time_ns, row.timings, sequence.index)
                        )
                    if row.finish_reason is not None:
                        waiting.discard(sequence.index)
        except EngineLostError:
            pass
        if waiting:
            logger.info("request %s: the engine gave no account of what it computed", self.id)
        return not waiting

    # Helpers ----------------------------------------------------------------------------------------------------

    def _page_hashes(self) -> tuple[int, ...]:
        """Names of the prompt's pages, for a place near its cached prefix. Only where all choices share one prompt."""
        prompts = self._parsed.prompts
        return page_hashes(self._namespace, prompts[0], PAGE_SIZE) if len(prompts) == 1 else ()
