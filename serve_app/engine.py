"""The engine deployment: each replica owns one engine actor, and serves no requests itself."""

from __future__ import annotations

from typing import Literal

from ray import serve

from engine_actor.actor import EngineActor, EngineSpec
from engine_actor.build import EngineOptions
from serve_app.owner import ActorOwner, ActorRecipe, versioned_name
from serve_app.settings import ModelSettings

DRAIN_SECONDS = 120.0
"""How long a replica that is shut down in order waits for the streams of its engine."""


class EngineOwner:
    """Serve deployment of one pool's engines; replica and engine actor belong together through a lease."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the replica is there when its actor is
        self, recipes: list[ActorRecipe]
    ) -> None:
        self._owner = ActorOwner(recipes)
        await self._owner.acquire()

    async def check_health(self) -> None:
        await self._owner.check_health()

    async def __del__(self) -> None:
        await self._owner.drain_and_release(DRAIN_SECONDS)


def engine_options(model: ModelSettings, device: Literal["cpu", "cuda"]) -> EngineOptions:
    """The options of a model's engines, with the device's defaults filled in."""
    limits = model.scheduler.for_device(device)
    memory = model.kv_cache.memory_gb
    return EngineOptions(
        source=model.source,
        revision=model.revision,
        engine=model.engine,
        dtype=model.dtype,
        quantization=model.quantization,
        attention=model.attention,
        threads=model.threads,
        kv_pages=model.kv_cache.pages,
        kv_bytes=None if memory is None else int(memory * 2**30),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        prefill_chunk_size=limits.prefill_chunk_size,
        kv_cache_utilization_limit=limits.kv_cache_utilization_limit,
        kv_watermark=limits.kv_watermark,
        request_level_batching=limits.request_level_batching,
        prefill_first=limits.prefill_first,
        async_scheduling=limits.async_scheduling,
    )


def engine_recipes(model: ModelSettings, device: Literal["cpu", "cuda"]) -> list[ActorRecipe]:
    """One engine actor per replica of the pool."""
    options = engine_options(model, device)
    resources = {"num_gpus": 1} if device == "cuda" else {}
    names = [versioned_name(f"engine/{model.id}/{index}", options) for index in range(model.engines)]
    return [ActorRecipe(name, EngineActor, EngineSpec(name, model.id, options), resources) for name in names]


def engine_deployment(name: str, replicas: int) -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(
        name=name,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
    )(EngineOwner)
    return deployment
