"""The engine as an actor: a step loop behind asynchronous calls, with leases in both directions.

The event loop stays free: loading happens in a thread, steps in the loop's own. Whoever owns the actor renews its
lease; without an owner it ends itself. Gateways renew a lease on their requests; without it those are aborted.
Ray's calls find the engine and open its channels; requests, rows and reports travel over sockets.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

import ray

from engine_actor.build import EngineOptions, build_engine, model_length
from engine_actor.calibration import calibrate
from engine_actor.channel_messages import Key, StepMessage
from engine_actor.executor import ExecutorInfo, GraphCounters
from engine_actor.gateways import Gateways, NotTakenError
from engine_actor.loop import EngineLoop, StepOutcome
from engine_actor.message_socket import MessageAddress, MessageConnection, MessageServer
from engine_actor.report import engine_report, pack_report, same_load, untold_service, with_events_of
from engine_actor.request import EngineRequest, StreamRow
from engine_actor.scheduler import Scheduler
from engine_actor.stats import EngineStats, EngineStatsSnapshot
from engine_actor.step_control import StepControl
from policies.tickets import EngineReport

logger = logging.getLogger(__name__)

OWNER_LEASE_SECONDS = 15.0
STALL_SECONDS = 30.0
"""An engine with work that makes no progress for this long is unhealthy. Longer than any sane step on a CPU."""

REPORT_SECONDS = 0.02
"""A step that only adds tokens to what runs is reported with a later one, this long after the last report."""

_TICK_SECONDS = 1.0

EngineState = Literal["loading", "ready", "draining", "failed", "stalled"]


class StaleEpochError(NotTakenError):
    """The caller speaks for a fair queue that has been replaced."""


class EngineNotReadyError(NotTakenError):
    """The engine is still loading, is draining or has failed."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine to build, under which name. `model` is the served model's id, for reports."""

    name: str
    model: str
    options: EngineOptions


@dataclass(frozen=True)
class EngineDescription:
    """What gateways need to know. `max_model_len` bounds prompt and output together, in tokens."""

    engine: str
    engine_epoch: int
    max_model_len: int
    vocab_size: int
    info: ExecutorInfo


@dataclass(frozen=True)
class Heartbeat:
    """State of an engine, taken on the path that serves requests."""

    engine: str
    engine_epoch: int
    state: EngineState
    owned: bool
    detail: str = ""


class EngineActor:
    """One engine. Every method is called on the actor's event loop; the step loop runs in a thread of its own."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.epoch = time.time_ns() // 1_000_000
        self._started: asyncio.Task[None] | None = None
        self._engine_loop: EngineLoop | None = None
        self._scheduler: Scheduler | None = None
        self._control: StepControl | None = None
        self._description: EngineDescription | None = None
        self._stats = EngineStats(spec.name, self.epoch, spec.model)
        self._graphs: GraphCounters | None = None
        self._counted = (0, 0, 0, 0)
        self._failure: str | None = None
        self._draining = False
        self._owner: str | None = None
        self._owner_renewed = time.monotonic()
        self._server = MessageServer()
        self._gateways = Gateways(self.submit, self.abort)
        self._queue_epoch = 0
        self._report_queue: asyncio.Queue[EngineReport | None] | None = None
        self._last_report: EngineReport | None = None
        self._cached_pages: set[int] = set()  # as of the last report

    # Life cycle -----------------------------------------------------------------------------------------------

    async def renew(self, owner: str) -> Heartbeat:
        """Renew the owner's lease, or take over one that has lapsed, and tell how the engine is.

        The first call starts loading. `owned` is False while another owner's lease is live.
        """
        now = time.monotonic()
        if self._owner in (None, owner) or now - self._owner_renewed > OWNER_LEASE_SECONDS / 2:
            self._owner, self._owner_renewed = owner, now
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        return self.heartbeat(owner)

    def heartbeat(self, owner: str) -> Heartbeat:
        state, detail = self._state()
        return Heartbeat(
            engine=self._spec.name,
            engine_epoch=self.epoch,
            state=state,
            owned=self._owner == owner,
            detail=detail,
        )

    async def drain(self) -> None:
        """Take no further grants; live requests go on."""
        self._draining = True
        if self._last_report is not None and self._report_queue is not None:
            self._report_queue.put_nowait(replace(self._last_report, draining=True))

    async def is_idle(self) -> bool:
        """No request is live here."""
        return not self._gateways.live_requests

    async def release(self, owner: str) -> None:
        """The owner gives the engine up: it ends at once."""
        if owner == self._owner:
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watch_leases())
        try:
            built = await asyncio.to_thread(build_engine, self._spec.options)
            model = await asyncio.to_thread(calibrate, built.runner, built.scheduler)
            # What loading left behind stays: a full collection over it would stop a step for 0.1 s and more.
            gc.collect()
            gc.freeze()
        except ValueError as error:  # the options or the checkpoint are wrong: the owner hears why
            self._failure = f"{type(error).__name__}: {error}"
            return
        except Exception as error:
            logger.exception("the engine could not start")
            self._failure = f"{type(error).__name__}: {error}"
            return
        runner = built.runner
        self._graphs, self._stats.info = runner.graphs, runner.info
        self._scheduler = Scheduler(built.scheduler, runner.num_pages, epoch=self.epoch)
        self._control = StepControl(self._scheduler, model)

        def on_outcome(outcome: StepOutcome) -> None:
            report = self._observe(outcome)
            loop.call_soon_threadsafe(self._dispatch, outcome, report, time.time_ns())

        def on_failure(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        self._engine_loop = EngineLoop(self._scheduler, runner, self._control, on_outcome, on_failure)
        self._last_report = self._report(())
        self._description = EngineDescription(
            engine=self._spec.name,
            engine_epoch=self.epoch,
            max_model_len=model_length(built.scheduler, runner.num_pages),
            vocab_size=built.vocab_size,
            info=runner.info,
        )
        self._engine_loop.start()
        logger.info("engine %s is ready: %s", self._spec.name, runner.info)

    def _state(self) -> tuple[EngineState, str]:
        if self._failure is not None:
            return "failed", self._failure
        if self._engine_loop is None:
            return "loading", ""
        stalled = time.monotonic() - self._engine_loop.last_progress
        if stalled > STALL_SECONDS:
            return "stalled", f"no progress for {stalled:.0f} s: {self._engine_loop.why_stalled()}"
        return ("draining", "") if self._draining else ("ready", "")

    def _fail(self, error: BaseException) -> None:
        """A step raised. The process ends, and so every gateway and the owner see it at once and in one way."""
        logger.critical("engine %s ends: %s", self._spec.name, error)
        _exit_process(1)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - self._owner_renewed > OWNER_LEASE_SECONDS:
                logger.warning(
                    "nobody has owned engine %s for %.0f s: it ends", self._spec.name, OWNER_LEASE_SECONDS
                )
                _exit_process()
            self._gateways.expire(now)

    async def describe(self) -> EngineDescription:
        """Raises EngineNotReadyError while the engine loads."""
        if self._description is None:
            raise EngineNotReadyError(f"engine {self._spec.name} is {self._state()[0]}")
        return self._description

    # Requests -------------------------------------------------------------------------------------------------

    async def open_channel(self, gateway: str) -> MessageAddress:
        """Where the gateway hands requests over and reads their rows. Raises OSError, EngineNotReadyError."""
        await self.describe()
        return await self._server.admit(
            f"gateway {gateway}", _host(), lambda connection: self._gateways.accept(connection, self._hello())
        )

    def submit(self, requests: list[EngineRequest]) -> None:
        """Take requests, all or none; a (request, attempt) taken before is ignored.

        Raises StaleEpochError when the grant came from an older fair queue, EngineNotReadyError when the engine does
        not serve.
        """
        if self._engine_loop is None or self._failure is not None:
            raise EngineNotReadyError(f"engine {self._spec.name} is not serving")
        oldest = min([request.queue_epoch for request in requests])
        if oldest < self._queue_epoch:
            raise StaleEpochError(f"queue epoch {oldest} is older than {self._queue_epoch}")
        for request in requests:
            self._engine_loop.submit(request)

    def abort(self, key: Key) -> None:
        """End a request early, if it is there."""
        if self._engine_loop is not None:
            self._engine_loop.abort(*key)

    def _hello(self) -> StepMessage:
        return StepMessage(self._spec.name, self.epoch, 0, time.time_ns())

    def _dispatch(self, outcome: StepOutcome, report: EngineReport, wall_time_ns: int) -> None:
        """Send the rows of a step to their gateways, and its report to the fair queue."""

        def message(rows: tuple[StreamRow, ...]) -> StepMessage:
            return StepMessage(self._spec.name, self.epoch, report.step, wall_time_ns, rows)

        self._gateways.dispatch(outcome.rows, message)
        self._last_report = report
        self._cached_pages.difference_update(report.page_hashes_removed)
        self._cached_pages.update(report.page_hashes_added)
        if self._report_queue is not None:
            self._report_queue.put_nowait(report)

    # Reports --------------------------------------------------------------------------------------------------

    async def queue_epoch(self) -> int:
        """The highest fair-queue epoch this engine has accepted."""
        return self._queue_epoch

    async def open_reports(self, queue_epoch: int) -> MessageAddress:
        """Where the fair queue of this epoch can read its reports. Raises StaleEpochError like `reports`, OSError."""
        if queue_epoch <= self._queue_epoch:
            raise StaleEpochError(f"queue epoch {queue_epoch} is not above {self._queue_epoch}")

        def accept(connection: MessageConnection) -> None:
            sending = asyncio.create_task(self._send_reports(queue_epoch, connection))
            connection.on_lost = sending.cancel

        return await self._server.admit("fair queue", _host(), accept)

    async def _send_reports(self, queue_epoch: int, connection: MessageConnection) -> None:
        try:
            async with aclosing(self.reports(queue_epoch)) as reports:
                async for report in reports:
                    connection.send(pack_report(report))
                    await connection.drained()  # one that lags gets fewer, and misses no event
        except StaleEpochError:
            pass  # a newer one has come first
        finally:
            connection.close()

    async def reports(self, queue_epoch: int) -> AsyncGenerator[EngineReport, None]:
        """Reports to the fair queue of the highest epoch: after every step that changes what decides an entry, else
        with the first step after REPORT_SECONDS, and twice a second when idle.

        Raises StaleEpochError for an epoch that is not higher than every one before.
        """
        if queue_epoch <= self._queue_epoch:
            raise StaleEpochError(f"queue epoch {queue_epoch} is not above {self._queue_epoch}")
        self._queue_epoch = queue_epoch
        queue: asyncio.Queue[EngineReport | None] = asyncio.Queue()
        older, self._report_queue = self._report_queue, queue
        if older is not None:
            older.put_nowait(None)
        sent, sent_at = None, 0.0
        told: dict[str, float] = {}
        held: EngineReport | None = None
        try:
            if self._last_report is not None:
                all_pages = tuple(self._cached_pages)
                first = replace(self._last_report, page_hashes_added=all_pages, page_hashes_removed=())
                yield untold_service(first, told)
            while self._report_queue is queue and (report := await queue.get()) is not None:
                if held is not None:
                    report, held = with_events_of(held, report), None
                while not queue.empty() and (newer := queue.get_nowait()) is not None:
                    report = with_events_of(report, newer)  # what is old by now is not told, its events are
                now = time.monotonic()
                if sent is not None and now - sent_at < REPORT_SECONDS and same_load(sent, report):
                    held = report
                    continue
                sent, sent_at = report, now
                yield untold_service(report, told)
        finally:
            if self._report_queue is queue:
                self._report_queue = None

    async def stats(self) -> EngineStatsSnapshot:
        """Counters for metrics."""
        snapshot = replace(
            self._stats.snapshot(time.monotonic()),
            live_requests=self._gateways.live_requests,
            tasks=len(asyncio.all_tasks()),
        )
        scheduler = self._scheduler
        return snapshot if scheduler is None else replace(snapshot, prefix=scheduler.state.prefix_counters())

    def _observe(self, outcome: StepOutcome) -> EngineReport:
        """Count a turn and write its report. Runs in the step loop's thread, which owns the scheduler."""
        scheduler = self._scheduler
        assert scheduler is not None
        record, result = outcome.record, outcome.result
        counted = self._counted
        self._counted = totals = (
            scheduler.service.recomputed_chunks,
            scheduler.preemptions,
            scheduler.service.cached_tokens,
            scheduler.service.computed_tokens,
        )
        recomputed, preempted, cached, computed = (
            new - old for new, old in zip(totals, counted, strict=True)
        )
        if record is not None and result is not None:
            chunks = record.chunk_lengths
            self._stats.observe_step(
                now=time.monotonic(),
                iteration_seconds=outcome.step_seconds,
                scheduler_seconds=outcome.scheduler_seconds,
                model_seconds=result.model_seconds,
                prefill_chunks=chunks,
                decode_requests=record.num_rows - len(chunks),
                recomputed_chunks=recomputed,
                preemptions=preempted,
            )
        if cached or computed:
            self._stats.observe_input(cached_tokens=cached, computed_tokens=computed)
        self._stats.set_state(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_pages=scheduler.cache.free,
            evictable_pages=scheduler.cache.evictable,
            total_pages=scheduler.cache.total,
            reclaimed_pages=scheduler.cache.evicted_pages,
            graphs=self._graphs,
            nonfinite_requests=scheduler.nonfinite_requests,
        )
        return self._report(tuple(outcome.accepted))

    def _report(self, accepted: tuple[Key, ...]) -> EngineReport:
        assert self._scheduler is not None and self._control is not None
        return engine_report(
            self._spec.name, self._scheduler, self._control, accepted=accepted, draining=self._draining
        )


def _host() -> str:
    """The address of this machine inside the cluster: loopback where it is the only one."""
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return host


def _exit_process(code: int = 0) -> None:
    os._exit(code)
