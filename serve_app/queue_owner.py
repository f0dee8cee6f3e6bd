"""The deployment that owns the fair queue of one engine pool."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from pydantic import SecretStr
from ray import serve
from ray.serve.handle import DeploymentHandle

from policies.service_accounts import QueueState
from serve_app.fair_queue import FairQueueActor, FairQueueSpec
from serve_app.owner import CALL_TIMEOUT_SECONDS, ActorOwner, ActorRecipe, versioned_name
from serve_app.queue_state import QueueStateKeeper
from serve_app.within import within


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
