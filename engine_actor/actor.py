"""The engine as an actor: a step loop behind asynchronous calls, with leases in both directions.

The event loop stays free: loading happens in a thread, steps in the loop's own. Whoever owns the actor renews its
lease; without an owner it ends itself. Gateways renew a lease on their requests; without it those are aborted.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Literal

import ray

from engine_actor.build import EngineOptions, build_engine, model_length
from engine_actor.calibration import calibrate
from engine_actor.executor import ExecutorInfo, GraphCounters
from engine_actor.loop import EngineLoop, StepOutcome
from engine_actor.report import engine_report, same_load, untold_service, with_events_of
from engine_actor.request import EngineRequest, StepMessage, StreamRow
from engine_actor.scheduler import Scheduler
from engine_actor.stats import EngineStats, EngineStatsSnapshot
from engine_actor.step_control import StepControl
from engine_actor.step_socket import StepAddress, StepServer
from policies.tickets import EngineReport

logger = logging.getLogger(__name__)

OWNER_LEASE_SECONDS = 15.0
REQUEST_LEASE_SECONDS = 10.0
STALL_SECONDS = 30.0
"""An engine with work that makes no progress for this long is unhealthy. Longer than any sane step on a CPU."""

REPORT_SECONDS = 0.02
"""A step that only adds tokens to what runs is reported with a later one, this long after the last report."""

_TICK_SECONDS = 1.0

Key = tuple[str, int]
EngineState = Literal["loading", "ready", "draining", "failed", "stalled"]


class StaleEpochError(RuntimeError):
    """The caller speaks for a fair queue, or to an engine, that has been replaced."""


class EngineNotReadyError(RuntimeError):
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


@dataclass
class _GatewayLease:
    """One connected gateway: its outbox and the requests it answers for."""

    renewed_at: float
    outbox: asyncio.Queue[StepMessage | None] = field(default_factory=asyncio.Queue)
    live: dict[Key, float] = field(default_factory=dict)  # request -> lease expiry


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
        self._gateways: dict[str, _GatewayLease] = {}
        self._gateway_of: dict[Key, str] = {}
        self._steps = StepServer(self.stream)
        self._queue_epoch = 0
        self._report_queue: asyncio.Queue[EngineReport] | None = None
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
        return not self._gateway_of

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
            for name, gateway in list(self._gateways.items()):
                for key in [key for key, expiry in gateway.live.items() if expiry < now]:
                    logger.warning("request %s lost its gateway: aborted", key[0])
                    self._abort(key)
                    del gateway.live[key]
                if now - gateway.renewed_at > REQUEST_LEASE_SECONDS and not gateway.live:
                    gateway.outbox.put_nowait(None)
                    del self._gateways[name]

    async def describe(self) -> EngineDescription:
        """Raises EngineNotReadyError while the engine loads."""
        if self._description is None:
            raise EngineNotReadyError(f"engine {self._spec.name} is {self._state()[0]}")
        return self._description

    # Requests -------------------------------------------------------------------------------------------------

    async def submit(self, gateway: str, requests: list[EngineRequest]) -> None:
        """Take requests; a (request, attempt) taken before is ignored.

        Raises StaleEpochError when the grant came from an older fair queue, EngineNotReadyError when the engine does
        not serve.
        """
        engine_loop = self._engine_loop
        if engine_loop is None or self._failure is not None:
            raise EngineNotReadyError(f"engine {self._spec.name} is not serving")
        lease = self._lease(gateway)
        for request in requests:
            if request.queue_epoch < self._queue_epoch:
                raise StaleEpochError(f"queue epoch {request.queue_epoch} is older than {self._queue_epoch}")
            key = (request.request, request.attempt)
            if key not in self._gateway_of:
                self._gateway_of[key] = gateway
                lease.live[key] = time.monotonic() + REQUEST_LEASE_SECONDS
            engine_loop.submit(request)

    async def abort(self, keys: list[Key]) -> None:
        """End requests early; each gets a last row with reason "abort"."""
        for key in keys:
            self._abort(key)

    async def renew_requests(self, gateway: str, keys: list[Key]) -> None:
        """Renew the lease of a gateway's live requests, and of the gateway itself."""
        lease = self._lease(gateway)
        expiry = time.monotonic() + REQUEST_LEASE_SECONDS
        for key in keys:
            if key in lease.live:
                lease.live[key] = expiry

    async def open_stream(self, gateway: str) -> StepAddress:
        """Where the gateway can read its streams. Raises OSError."""
        self._lease(gateway)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return await self._steps.admit(gateway, host)

    async def stream(self, gateway: str) -> AsyncGenerator[bytes, None]:
        """All streams of one gateway, one packed StepMessage per step. A later call takes over from an earlier one.

        Gateways read it from the address that `open_stream` names.
        """
        lease = self._lease(gateway)
        outbox: asyncio.Queue[StepMessage | None] = asyncio.Queue()
        old, lease.outbox = lease.outbox, outbox
        while not old.empty():
            outbox.put_nowait(old.get_nowait())
        old.put_nowait(None)
        yield StepMessage(self._spec.name, self.epoch, 0, time.time_ns()).pack()
        while (message := await outbox.get()) is not None:
            yield message.pack()

    def _lease(self, gateway: str) -> _GatewayLease:
        lease = self._gateways.get(gateway)
        if lease is None:
            lease = self._gateways[gateway] = _GatewayLease(time.monotonic())
        lease.renewed_at = time.monotonic()
        return lease

    def _abort(self, key: Key) -> None:
        if self._engine_loop is not None:
            self._engine_loop.abort(*key)

    def _dispatch(self, outcome: StepOutcome, report: EngineReport, wall_time_ns: int) -> None:
        """Sort the rows of a step by gateway and put one message into each outbox."""
        by_gateway: dict[str, list[StreamRow]] = {}
        for row in outcome.rows:
            key = (row.request, row.attempt)
            name = self._gateway_of.get(key) if row.finish_reason is None else self._gateway_of.pop(key, None)
            gateway = self._gateways.get(name) if name is not None else None
            if name is None or gateway is None:
                continue
            if row.finish_reason is not None:
                gateway.live.pop(key, None)
            by_gateway.setdefault(name, []).append(row)
        for name, rows in by_gateway.items():
            message = StepMessage(self._spec.name, self.epoch, report.step, wall_time_ns, tuple(rows))
            self._gateways[name].outbox.put_nowait(message)
        self._last_report = report
        self._cached_pages.difference_update(report.page_hashes_removed)
        self._cached_pages.update(report.page_hashes_added)
        if self._report_queue is not None:
            self._report_queue.put_nowait(report)

    # Reports --------------------------------------------------------------------------------------------------

    async def queue_epoch(self) -> int:
        """The highest fair-queue epoch this engine has accepted."""
        return self._queue_epoch

    async def reports(self, queue_epoch: int) -> AsyncIterator[EngineReport]:
        """Reports to the fair queue of the highest epoch: after every step that changes what decides an entry, else
        with the first step after REPORT_SECONDS, and twice a second when idle.

        Raises StaleEpochError for an epoch that is not higher than every one before.
        """
        if queue_epoch <= self._queue_epoch:
            raise StaleEpochError(f"queue epoch {queue_epoch} is not above {self._queue_epoch}")
        self._queue_epoch = queue_epoch
        queue: asyncio.Queue[EngineReport] = asyncio.Queue()
        self._report_queue = queue
        sent, sent_at = None, 0.0
        told: dict[str, float] = {}
        held: EngineReport | None = None
        if self._last_report is not None:
            all_pages = tuple(self._cached_pages)
            first = replace(self._last_report, page_hashes_added=all_pages, page_hashes_removed=())
            yield untold_service(first, told)
        while self._report_queue is queue:
            report = await queue.get()
            if held is not None:
                report, held = with_events_of(held, report), None
            while not queue.empty():  # a reader that lags gets the newest state and misses no event
                report = with_events_of(report, queue.get_nowait())
            now = time.monotonic()
            if sent is not None and now - sent_at < REPORT_SECONDS and same_load(sent, report):
                held = report
                continue
            sent, sent_at = report, now
            yield untold_service(report, told)

    async def stats(self) -> EngineStatsSnapshot:
        """Counters for metrics."""
        snapshot = replace(
            self._stats.snapshot(time.monotonic()),
            live_requests=len(self._gateway_of),
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


def _exit_process(code: int = 0) -> None:
    os._exit(code)
