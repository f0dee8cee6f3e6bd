"""The embedded Redis as a deployment, for `serve run`, where no front door owns it."""

from __future__ import annotations

import asyncio

from ray import serve

from tenancy.redis import EmbeddedRedis


class RedisOwner:
    """Serve deployment: a redis-server that lives as long as its only replica."""

    def __init__(self, data_dir: str) -> None:
        self._redis = EmbeddedRedis(data_dir)
        self._redis.start()

    async def url(self) -> str:
        """Where it listens, with its password. Changes when a new replica starts it again."""
        return self._redis.url

    async def check_health(self) -> None:
        if not self._redis.running:
            raise RuntimeError("the embedded Redis has ended")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._redis.stop)


def redis_deployment() -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(
        name="Redis",
        num_replicas=1,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
    )(RedisOwner)
    return deployment
