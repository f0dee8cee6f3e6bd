"""The fair queue of one engine pool: a single actor that decides entry, and the deployment that owns it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from pydantic import SecretStr
from ray import serve
from ray.serve.handle import DeploymentHandle

from policies.fair_queue import FairQueue, QueuePolicy, TenantSnapshot
from policies.guardrails import Guardrails, ProtectionLines
from policies.output_length import OutputLength
from policies.service_accounts import QueueState
from policies.tickets import Grant, Refusal, Ticket
from serve_app.owner import CALL_TIMEOUT_SECONDS, ActorOwner, ActorRecipe, find_actor, versioned_name
from serve_app.queue_state import QueueStateKeeper
from serve_app.within import within

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


@dataclass(frozen=True)
class QueueSnapshot:
    """For metrics and readiness."""

    queue_epoch: int
    engines: tuple[str, ...]
    queued: int
    tenants: dict[str, TenantSnapshot] = field(default_factory=dict)
    protection_step: int = 0
    output_lengths: dict[str, OutputLength] = field(default_factory=dict)


@dataclass(frozen=True)
class _Asking:
    """A gateway that waits for an answer."""

    gateway: str
    answer: asyncio.Future[Grant | Refusal]


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
        self._asking: dict[tuple[str, int], _Asking] = {}
        self._gateways: dict[str, float] = {}  # and when they were last heard of
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

    async def enqueue(self, ticket: Ticket, gateway: str) -> Grant | Refusal:
        """Wait for a ticket's turn. Asking again, with the age it has reached, is safe at any time.

        Ends by cancellation when the gateway falls silent: if it is there after all, it asks again.
        """
        self._gateways[gateway] = now = time.monotonic()
        key = (ticket.request, ticket.attempt)
        is_new = key not in self._asking
        if is_new and (shed := self._rails.shed(ticket)) is not None:
            return shed
        refusal = self._queue.push(ticket, now)
        if is_new:
            self._rails.observe_offer(refusal is not None, now)
        if refusal is not None:
            self._answer(refusal)  # who asked before, and still waits, hears the same
            return refusal
        self._hang_up(key)
        asking = _Asking(gateway, asyncio.get_running_loop().create_future())
        self._asking[key] = asking
        self._pump()
        try:
            return await asking.answer
        finally:
            if self._asking.get(key) is asking:
                del self._asking[key]

    async def withdraw(self, request: str, attempt: int) -> None:
        """The client of a ticket has gone, or its grant will not be used."""
        self._queue.withdraw(request, attempt)
        self._answer(Refusal(request, attempt, "cancelled", "the ticket was withdrawn"))
        self._pump()

    async def export_state(self) -> QueueState:
        """The counters, for a successor."""
        return self._queue.export_state()

    async def snapshot(
        self,
        gateway: str,
        lines: ProtectionLines | None = None,
        output_lengths: tuple[tuple[str, int], ...] = (),
    ) -> QueueSnapshot:
        """Renews the lease of the gateway that asks. It brings its protection lines, which may change any time, and
        (tenant, output tokens) of the sequences that ended by themselves since it asked last."""
        self._gateways[gateway] = time.monotonic()
        if lines is not None:
            self._rails.lines = lines
        for tenant, tokens in output_lengths:
            self._queue.output_lengths.observe(tenant, tokens)
        return QueueSnapshot(
            self._queue.queue_epoch,
            tuple(sorted(self._engines)),
            len(self._queue),
            self._queue.snapshot(),
            self._rails.step,
            self._queue.output_lengths.export(),
        )

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
            self._drop_silent_gateways(now)
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
        asking = self._asking.get((answer.request, answer.attempt))
        if asking is None or asking.answer.done():
            return False
        asking.answer.set_result(answer)
        return True

    def _hang_up(self, key: tuple[str, int]) -> None:
        asking = self._asking.pop(key, None)
        if asking is not None:
            asking.answer.cancel()

    def _drop_silent_gateways(self, now: float) -> None:
        silent = {name for name, seen in self._gateways.items() if now - seen > GATEWAY_LEASE_SECONDS}
        if not silent:
            return
        for key in [key for key, asking in self._asking.items() if asking.gateway in silent]:
            self._queue.withdraw(*key)
            self._hang_up(key)
        for name in silent:
            logger.warning("gateway %s was not heard of for %.0f s", name, now - self._gateways.pop(name))

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
            except ray.exceptions.RayError as error:
                logger.info("reports of engine %s end: %s", name, type(error).__name__)
            if name in self._engines:
                self._lose(name)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _read_reports(self, name: str, actor: Any) -> None:
        # Claim an epoch above every one this engine knows, so that it listens to nobody else.
        known = await actor.queue_epoch.remote()
        self._queue.queue_epoch = max(self._queue.queue_epoch, known) + 1
        reports = actor.reports.options(num_returns="streaming").remote(self._queue.queue_epoch)
        async for reference in reports:
            report = await reference
            if name not in self._engines:
                logger.info("engine %s (epoch %d) reports", name, report.engine_epoch)
            self._engines[name] = now = time.monotonic()
            self._queue.observe_report(self._rails.observe_report(report, now), now)
            self._pump()


class FairQueueOwner:
    """Serve deployment: owns the fair queue of one pool, serves no requests itself.

    A queue that it makes anew goes on with the counters of the one before.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the replica is there when its actor is
        self, recipe: ActorRecipe, redis: SecretStr | DeploymentHandle[Any]
    ) -> None:
        keeper = QueueStateKeeper(recipe.spec.model, redis)
        restored = await keeper.load()
        self._owner = ActorOwner([replace(recipe, spec=replace(recipe.spec, restored=restored))])
        await self._owner.acquire()
        self._keeping = asyncio.create_task(keeper.keep(self._export))

    async def check_health(self) -> None:
        await self._owner.check_health()

    async def __del__(self) -> None:
        self._keeping.cancel()
        await self._owner.release()

    async def _export(self) -> QueueState | None:
        actor = self._owner.actor
        return None if actor is None else await within(CALL_TIMEOUT_SECONDS, actor.export_state.remote())


def fair_queue_recipe(spec: FairQueueSpec) -> ActorRecipe:
    """The pool's queue actor; its name is the pool's, so that there is only one."""
    return ActorRecipe(versioned_name(f"fair-queue/{spec.model}", spec), FairQueueActor, spec, {})


def fair_queue_deployment(name: str) -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(
        name=name,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.1,
    )(FairQueueOwner)
    return deployment
