"""The ownership pattern for long-lived actors, once, for engines and fair queues.

A Serve replica owns one detached actor: it creates it or re-attaches to it by name, renews its lease, answers Serve's
health check with the actor's heartbeat, and releases it when it is shut down in order. An owner that dies without a
word leaves the actor alive for its successor; an actor without an owner ends itself when the lease runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from serve_app.within import within

logger = logging.getLogger(__name__)

NAMESPACE = "evenhand"
RENEW_SECONDS = 2.0
CALL_TIMEOUT_SECONDS = 5.0
_RETRY_SECONDS = 0.25


class OwnedHeartbeat(Protocol):
    """What an owned actor answers to `renew`."""

    @property
    def state(self) -> str: ...

    @property
    def owned(self) -> bool: ...

    @property
    def detail(self) -> str: ...


@dataclass(frozen=True)
class ActorRecipe:
    """How to make one named actor: `spec` is the constructor's argument, `options` go to Ray."""

    name: str
    actor_class: type
    spec: Any
    options: dict[str, Any]


def versioned_name(base: str, settings: Any) -> str:
    """A name that changes with the settings: an actor made from others is replaced, never re-attached to."""
    return f"{base}@{hashlib.sha256(repr(settings).encode()).hexdigest()[:12]}"


class ActorFailedError(RuntimeError):
    """The actor reports a failure that waiting will not mend, such as a model that cannot be loaded."""


class ActorOwner:
    """Owns one actor out of `recipes` (one per instance of a deployment): the first that no live owner holds."""

    def __init__(self, recipes: list[ActorRecipe]) -> None:
        self._recipes = recipes
        self._id = uuid.uuid4().hex
        self._actor: Any = None
        self._recipe: ActorRecipe | None = None
        self._heartbeat: OwnedHeartbeat | None = None
        self._failure: str | None = None
        self._renewal: asyncio.Task[None] | None = None

    @property
    def actor(self) -> Any | None:
        """Handle of the owned actor, None before `acquire` and after `release`."""
        return self._actor

    async def acquire(self) -> None:
        """Take an actor and wait until it is ready. Raises ActorFailedError when it says that it cannot be."""
        while self._actor is None:
            for recipe in self._recipes:
                if await self._try(recipe):
                    break
            else:
                await asyncio.sleep(_RETRY_SECONDS)
        self._renewal = asyncio.create_task(self._keep_renewing())
        while self._heartbeat is None or self._heartbeat.state != "ready":
            if self._failure is not None:
                raise ActorFailedError(self._failure)
            if self._heartbeat is not None and self._heartbeat.state == "failed":
                detail = self._heartbeat.detail
                await self.release()
                raise ActorFailedError(detail)
            await asyncio.sleep(_RETRY_SECONDS)
            await self._renew_once()

    async def check_health(self) -> None:
        """Raise unless the actor answers, is ours, and serves. Serve then replaces the replica, and it the actor."""
        await self._renew_once()
        if self._failure is not None:
            raise ActorFailedError(self._failure)
        heartbeat = self._heartbeat
        if heartbeat is None or heartbeat.state not in ("ready", "draining") or not heartbeat.owned:
            if heartbeat is not None and heartbeat.owned:
                ray.kill(self._actor)  # it answers but does not serve: its successor starts afresh
            raise ActorFailedError(f"{self._name}: {heartbeat}")

    async def release(self) -> None:
        """End the actor in order."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._actor is None:
            return
        actor, self._actor = self._actor, None
        # The actor ends while it answers.
        with contextlib.suppress(ray.exceptions.RayError, asyncio.TimeoutError):
            await within(CALL_TIMEOUT_SECONDS, actor.release.remote(self._id))

    async def drain_and_release(self, seconds: float) -> None:
        """Let the actor finish what it has, for so long at most, and end it. It takes nothing new meanwhile."""
        if self._actor is not None and self._failure is None:
            try:
                await within(seconds, self._drain())
            except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
                logger.warning("%s did not drain: %s", self._name, type(error).__name__)
        await self.release()

    async def _drain(self) -> None:
        await self._actor.drain.remote()
        while not await self._actor.is_idle.remote():
            await asyncio.sleep(_RETRY_SECONDS)

    @property
    def _name(self) -> str:
        return "an actor" if self._recipe is None else self._recipe.name

    async def _try(self, recipe: ActorRecipe) -> bool:
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 10_000, **recipe.options}
        actor: Any = (
            ray.remote(recipe.actor_class)
            .options(
                name=recipe.name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, **options
            )
            .remote(recipe.spec)
        )
        try:
            heartbeat = await within(60.0, actor.renew.remote(self._id))
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            logger.warning("actor %s cannot be owned yet: %s", recipe.name, type(error).__name__)
            return False
        if not heartbeat.owned:
            return False
        self._actor, self._recipe, self._heartbeat = actor, recipe, heartbeat
        return True

    async def _renew_once(self) -> None:
        if self._actor is None:
            return
        try:
            self._heartbeat = await within(CALL_TIMEOUT_SECONDS, self._actor.renew.remote(self._id))
        except asyncio.TimeoutError:
            self._failure = f"{self._name} has not answered for {CALL_TIMEOUT_SECONDS:.0f} s"
            ray.kill(self._actor)  # its name must be free for a successor
        except ray.exceptions.RayError as error:
            self._failure = f"{self._name} has died ({type(error).__name__})"

    async def _keep_renewing(self) -> None:
        while self._failure is None:
            await asyncio.sleep(RENEW_SECONDS)
            await self._renew_once()


def find_actor(name: str) -> Any | None:
    """Handle of the live actor of that name, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
