"""The fair queue of one engine pool: a single actor that decides entry."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from engine_actor.message_socket import MessageAddress, MessageConnection, MessageServer, connect
from engine_actor.report import unpack_report
from policies.fair_queue import FairQueue, QueuePolicy
from policies.guardrails import Guardrails
from policies.service_accounts import QueueState
from policies.tickets import EngineReport, Grant, Refusal, Ticket
from serve_app.owner import find_actor
from serve_app.queue_messages import QueueSnapshot, Tell, Withdraw, pack_reply, unpack_question

logger = logging.getLogger(__name__)

OWNER_LEASE_SECONDS = 15.0
GATEWAY_LEASE_SECONDS = 6.0
"""Tickets of a gateway that was silent for so long leave: a grant to nobody would hold a slot for its time to live."""

_TICK_SECONDS = 0.1
_RECONNECT_SECONDS = 0.25
_ENGINE_SILENCE_SECONDS = 5.0


@dataclass(frozen=True)
class FairQueueSpec:
    """A pool's queue: which engines it serves (actor names) and its limits. Times in milliseconds.

    `restored` is what a predecessor had counted; it is no part of the actor's name.
    """

    model: str
    engines: tuple[str, ...]
    policy: QueuePolicy
    locality_window: float
    max_queued_requests: int
    max_queued_per_tenant: int
    max_queued_tokens: int
    max_queued_tokens_per_tenant: int
    waiting_timeout_ms: float
    restored: QueueState | None = None


@dataclass(frozen=True)
class QueueHeartbeat:
    """State of a fair queue, for its owner."""

    queue_epoch: int
    state: str
    owned: bool
    detail: str = ""


class Asker(Protocol):
    """A gateway that waits for answers."""

    def answer(self, answer: Grant | Refusal) -> None: ...


class _Gateway:
    """A connected gateway, and when it was last heard of."""

    def __init__(self, name: str, connection: MessageConnection) -> None:
        self.name = name
        self.connection = connection
        self.heard_at = time.monotonic()

    def answer(self, answer: Grant | Refusal) -> None:
        self.connection.send(pack_reply(answer))


class FairQueueActor:
    """Holds waiting tickets (metadata only) and answers each with a grant or a refusal. One event loop, no threads.

    A new one loses nothing: gateways still hold their tickets and ask again with their age, engines report
    cumulative service.
    """

    def __init__(self, spec: FairQueueSpec) -> None:
        self._spec = spec
        self._queue = FairQueue(
            queue_epoch=0,
            policy=spec.policy,
            locality_window=spec.locality_window,
            max_queued_requests=spec.max_queued_requests,
            max_queued_per_tenant=spec.max_queued_per_tenant,
            max_queued_tokens=spec.max_queued_tokens,
            max_queued_tokens_per_tenant=spec.max_queued_tokens_per_tenant,
        )
        if spec.restored is not None:
            self._queue.restore(spec.restored, time.monotonic())
        self._rails = Guardrails()
        self._asking: dict[tuple[str, int], Asker] = {}
        self._gateways: set[_Gateway] = set()
        self._server = MessageServer()
        self._engines: dict[str, float] = {}  # reporting engines and when they last did
        self._owner: str | None = None
        self._owner_renewed = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def renew(self, owner: str) -> QueueHeartbeat:
        """Renew the owner's lease, or take over one that has lapsed. The first call starts the work."""
        now = time.monotonic()
        if self._owner in (None, owner) or now - self._owner_renewed > OWNER_LEASE_SECONDS / 2:
            self._owner, self._owner_renewed = owner, now
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._tick())]
            self._tasks += [asyncio.create_task(self._follow(name)) for name in self._spec.engines]
        return QueueHeartbeat(self._queue.queue_epoch, "ready", self._owner == owner)

    async def release(self, owner: str) -> None:
        if owner == self._owner:
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    async def open_exchange(self, gateway: str) -> MessageAddress:
        """Where the gateway asks for entry. Raises OSError."""
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return await self._server.admit(gateway, host, lambda connection: self._accept(gateway, connection))

    def ask(self, ticket: Ticket, asker: Asker) -> None:
        """Queue a ticket; the asker gets its answer, now or when its turn comes. Asking again, with the age it has
        reached, is safe at any time: the last one who asked gets the answer."""
        key = (ticket.request, ticket.attempt)
        is_new, now = key not in self._asking, time.monotonic()
        if is_new and (shed := self._rails.shed(ticket)) is not None:
            asker.answer(shed)
            return
        self._asking[key] = asker
        refusal = self._queue.push(ticket, now)
        if is_new:
            self._rails.observe_offer(refusal is not None, now)
        if refusal is not None:
            self._answer(refusal)
        else:
            self._pump()

    def withdraw(self, request: str, attempt: int) -> None:
        """The client of a ticket has gone, or its grant will not be used."""
        self._asking.pop((request, attempt), None)
        self._queue.withdraw(request, attempt)
        self._pump()

    async def export_state(self) -> QueueState:
        """The counters, for a successor."""
        return self._queue.export_state()

    def tell(self, told: Tell) -> QueueSnapshot:
        """A gateway is there: what it tells is taken, and the queue's state is the answer."""
        self._rails.lines = told.lines
        for tenant, tokens in told.output_lengths:
            self._queue.output_lengths.observe(tenant, tokens)
        return QueueSnapshot(
            self._queue.queue_epoch,
            tuple(sorted(self._engines)),
            len(self._queue),
            self._queue.snapshot(),
            self._rails.step,
            self._queue.output_lengths.export(),
        )

    def _accept(self, name: str, connection: MessageConnection) -> None:
        gateway = _Gateway(name, connection)
        self._gateways.add(gateway)
        connection.on_message = lambda data: self._hear(gateway, data)
        connection.on_lost = lambda: self._lose_gateway(gateway)

    def _hear(self, gateway: _Gateway, data: bytes) -> None:
        question = unpack_question(data)
        gateway.heard_at = time.monotonic()
        if isinstance(question, Ticket):
            self.ask(question, gateway)
        elif isinstance(question, Withdraw):
            self.withdraw(question.request, question.attempt)
        else:
            gateway.connection.send(pack_reply(self.tell(question)))

    def _lose_gateway(self, gateway: _Gateway) -> None:
        """If it is there after all, it asks again."""
        self._gateways.discard(gateway)
        for key in [key for key, asker in self._asking.items() if asker is gateway]:
            del self._asking[key]
            self._queue.withdraw(*key)
        self._pump()

    def _pump(self) -> None:
        """Give out every grant that can be given now."""
        while (grant := self._queue.next_grant(time.monotonic())) is not None:
            if self._answer(grant):
                self._rails.observe_grant(grant, time.monotonic())
            else:
                self._queue.withdraw(grant.request, grant.attempt)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - self._owner_renewed > OWNER_LEASE_SECONDS:
                logger.warning(
                    "nobody has owned the fair queue of %s for %.0f s: it ends",
                    self._spec.model,
                    OWNER_LEASE_SECONDS,
                )
                os._exit(0)
            for ticket in self._queue.expire(now, self._spec.waiting_timeout_ms):
                self._refuse(ticket)
            step = self._rails.step
            if self._rails.evaluate(now) != step:
                logger.warning(
                    "protection step %d of %s (%s)", self._rails.step, self._spec.model, self._rails.crossed
                )
            for refusal in self._queue.break_promises(now):
                self._answer(refusal)
            self._cut_off_silent_gateways(now)
            for name, seen in list(self._engines.items()):
                if now - seen > _ENGINE_SILENCE_SECONDS:
                    self._lose(name)
            self._pump()

    def _refuse(self, ticket: Ticket) -> None:
        code = "queue_timeout" if self._engines else "engine_unavailable"
        message = f"no engine could take the request within {self._spec.waiting_timeout_ms / 1000:.0f} s"
        self._answer(Refusal(ticket.request, ticket.attempt, code, message, retry_after_ms=1000.0))

    def _answer(self, answer: Grant | Refusal) -> bool:
        """False when nobody waits for it."""
        asker = self._asking.pop((answer.request, answer.attempt), None)
        if asker is not None:
            asker.answer(answer)
        return asker is not None

    def _cut_off_silent_gateways(self, now: float) -> None:
        for gateway in [one for one in self._gateways if now - one.heard_at > GATEWAY_LEASE_SECONDS]:
            logger.warning("gateway %s was not heard of for %.0f s", gateway.name, now - gateway.heard_at)
            gateway.connection.close()

    def _lose(self, name: str) -> None:
        logger.warning("engine %s no longer reports", name)
        self._engines.pop(name, None)
        self._queue.forget_engine(name)
        self._rails.forget_engine(name)

    async def _follow(self, name: str) -> None:
        """Read one engine's reports for ever, through its deaths and successors."""
        while True:
            try:
                actor = find_actor(name)
                if actor is not None:
                    await self._read_reports(name, actor)
            except (ray.exceptions.RayError, OSError) as error:
                logger.info("reports of engine %s end: %s", name, type(error).__name__)
            except Exception:  # a queue without its engine must not stay so
                logger.exception("reports of engine %s end", name)
            if name in self._engines:
                self._lose(name)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _read_reports(self, name: str, actor: Any) -> None:
        # Claim an epoch above every one this engine knows, so that it listens to nobody else.
        known = await actor.queue_epoch.remote()
        self._queue.queue_epoch = max(self._queue.queue_epoch, known) + 1
        lost = asyncio.Event()
        address = await actor.open_reports.remote(self._queue.queue_epoch)
        connection = await connect(address, lambda data: self._hear_report(unpack_report(data)), lost.set)
        try:
            await lost.wait()
        finally:
            connection.close()

    def _hear_report(self, report: EngineReport) -> None:
        if report.engine not in self._engines:
            logger.info("engine %s (epoch %d) reports", report.engine, report.engine_epoch)
        self._engines[report.engine] = now = time.monotonic()
        self._queue.observe_report(self._rails.observe_report(report, now), now)
        self._pump()
