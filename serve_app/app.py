"""The Serve application: `build(args)` wires gateways, fair queues and engines from the config's `args`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import ray
from pydantic import SecretStr
from ray import serve
from ray.serve.handle import DeploymentHandle
from redis.asyncio import Redis

from engine_actor.build import STUB_MODEL_LEN
from serve_app.client_address import HAPROXY_VARIABLE, ClientAddresses
from serve_app.engine import engine_deployment, engine_recipes
from serve_app.exposure import is_loopback, refuse_demo_keys
from serve_app.fair_queue import FairQueueSpec
from serve_app.gateway import GatewayApp
from serve_app.pool import ModelPool
from serve_app.queue_owner import fair_queue_deployment, fair_queue_recipe
from serve_app.redis_owner import redis_deployment
from serve_app.settings import AppSettings, ModelSettings, parse_args, parse_user_config
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.gateway import GatewayTelemetry
from serve_app.telemetry.metrics import GatewayMetrics
from serve_app.telemetry.tracing import TracingConfig, build_tracing
from serve_app.text.model_text import ModelText, load_model_text, stub_model_text
from serve_app.trailers import drop_trailers
from tenancy.directory import TenantDirectory
from tenancy.directory_store import DirectoryStore, DirectoryWatch
from tenancy.ledger import LedgerFiles
from tenancy.ledger_writer import LedgerWriter
from tenancy.models import Price
from tenancy.quota import QuotaStore
from tenancy.redis import BLOCKING_TIMEOUT_S, connect
from tenancy.secret_file import load_or_create_secret

logger = logging.getLogger(__name__)

_REDIS_WATCH_SECONDS = 2.0


class Gateway:
    """The ingress deployment: one GatewayApp per replica. `user_config` (tenants) reloads without a restart."""

    def __init__(
        self,
        settings: AppSettings,
        names: dict[str, tuple[str, tuple[str, ...]]],
        data_dir: str,
        redis: DeploymentHandle[Any] | None,
        owners: list[DeploymentHandle[Any]],
    ) -> None:
        """`names` maps a model to the actor names of its fair queue and engines; `owners` are part of the app."""
        drop_trailers()
        gateway = uuid.uuid4().hex
        self._redis = redis
        self._redis_url = settings.redis_url
        tracing = settings.telemetry.tracing
        telemetry = GatewayTelemetry(
            build_tracing(
                TracingConfig(
                    tracing.exporter,
                    tracing.endpoint,
                    None if tracing.path is None else Path(tracing.path),
                    tracing.sampling_ratio,
                )
            ),
            GatewayMetrics([name for model in settings.models for name in (model.id, *model.aliases)]),
            AccessLog(Path(data_dir) / "logs" / "access.jsonl") if settings.telemetry.access_log else None,
        )
        self._gateway = GatewayApp(
            pools=[
                ModelPool(model.id, tuple(model.aliases), model_text(model), *names[model.id], gateway)
                for model in settings.models
            ],
            directory=TenantDirectory([], load_or_create_secret(Path(data_dir) / "server.secret")),
            quota=None,
            telemetry=telemetry,
            max_request_bytes=settings.gateway.max_request_bytes,
            waiting_timeouts={
                model.id: model.scheduler.for_device(device()).waiting_timeout_ms / 1000
                for model in settings.models
            },
            version=version("evenhand"),
            cors_origins=settings.gateway.cors_origins,
            addresses=ClientAddresses(
                settings.gateway.trusted_proxies, behind_haproxy=HAPROXY_VARIABLE in os.environ
            ),
            max_failed_logins=settings.gateway.max_failed_logins_per_minute,
        )
        self._prices: dict[str, Price] = {}
        self._gateway.directory.complete = False
        self._directory_watch: DirectoryWatch | None = None
        self._ledger: LedgerWriter | None = None
        self._clients: list[Redis] = []
        self._ledger_files = LedgerFiles(Path(data_dir) / "ledger")
        if self._redis_url is not None:
            self._gateway.quota = self._connect(self._redis_url)
        else:
            self._watch = asyncio.create_task(self._watch_redis())
        # What loading left behind stays: a full collection over it would hold up every stream.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Any:
        """What Serve calls for the ASGI app of this replica."""
        return self._gateway.asgi()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the tenants of the config file. Raises ConfigError, and the old ones stay."""
        settings = parse_user_config(user_config)
        tenants = settings.tenants
        refuse_demo_keys(tenants, http_host())
        self._prices = settings.prices
        if self._gateway.quota is not None:
            self._gateway.quota.prices = self._prices
        self._gateway.directory.update(tenants, settings.tiers)
        self._gateway.slo = settings.slo
        for pool in self._gateway.pools:
            pool.queue.protection_lines = settings.slo.lines()
        admin = self._gateway.admin
        admin.prices = settings.prices
        admin.keys = {}
        if settings.admin is not None and (settings.admin.allow_remote or is_loopback(http_host())):
            admin.keys = settings.admin.keys
        key = settings.metrics_key
        self._gateway.metrics_key = None if key is None else key.get_secret_value()
        self._gateway.telemetry.metrics.retain_tenants(list(self._gateway.directory.tenants()))

    async def check_health(self) -> None:
        """Serve asks on the loop that serves requests: an answer is the proof."""

    async def __del__(self) -> None:
        await self._gateway.close()
        await self._stop_redis_work()

    async def _stop_redis_work(self) -> None:
        if self._directory_watch is not None and self._ledger is not None:
            await self._directory_watch.aclose()
            await self._ledger.aclose()
        for client in self._clients:
            await client.aclose()

    def _connect(self, url: str) -> QuotaStore:
        """Everything of this gateway that Redis keeps: quotas, and tenants managed at run time."""
        redis = connect(url)
        store = QuotaStore(redis, prices=self._prices, unconfirmed=self._ledger_files.write)
        store.start()
        self._gateway.admin.store = DirectoryStore(redis, store.guarded)
        blocking = connect(url, socket_timeout_s=BLOCKING_TIMEOUT_S)
        self._clients = [redis, blocking]
        self._directory_watch = DirectoryWatch(
            DirectoryStore(blocking, store.guarded), self._gateway.directory
        )
        self._ledger = LedgerWriter(blocking, store, self._ledger_files)
        self._ledger.start()
        return store

    async def _watch_redis(self) -> None:
        """Follow the embedded Redis: a new replica of it listens somewhere else."""
        assert self._redis is not None
        while True:
            try:
                url = await self._redis.url.remote()
                if url != self._redis_url:
                    self._redis_url, old = url, self._gateway.quota
                    await self._stop_redis_work()
                    self._gateway.quota = self._connect(url)
                    if old is not None:
                        await old.aclose()
            except ray.exceptions.RayError as error:
                logger.warning("the embedded Redis did not answer: %s", type(error).__name__)
            await asyncio.sleep(_REDIS_WATCH_SECONDS)


def model_text(model: ModelSettings) -> ModelText:
    """The text side of a model, read from where its weights come from."""
    if model.engine == "stub":
        return stub_model_text(model.scheduler.max_model_len or STUB_MODEL_LEN)
    return load_model_text(model.source, model.revision)


def device() -> Literal["cpu", "cuda"]:
    """What engines run on in this cluster."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return "cuda" if resources.get("GPU", 0) > 0 else "cpu"


def http_host() -> str:
    """The host that Serve listens on."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "only called inside a replica"
    host: str = client.http_config.host
    return host


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a config file. Raises ConfigError for bad `args`."""
    settings = parse_args(args)
    data_dir = str(Path(settings.data_dir or "var/serve").expanduser().resolve())
    names: dict[str, tuple[str, tuple[str, ...]]] = {}
    owners: list[Any] = []
    embedded = redis_deployment().bind(str(Path(data_dir) / "redis")) if settings.redis_url is None else None
    redis = embedded if settings.redis_url is None else SecretStr(settings.redis_url)  # Ray logs arguments
    for model in settings.models:
        recipes = engine_recipes(model, device())
        limits = model.scheduler.for_device(device())
        queue = fair_queue_recipe(
            FairQueueSpec(
                model=model.id,
                engines=tuple(recipe.name for recipe in recipes),
                policy=limits.policy,
                locality_window=limits.locality_window,
                max_queued_requests=settings.gateway.max_queued_requests,
                max_queued_per_tenant=settings.gateway.max_queued_per_tenant,
                max_queued_tokens=settings.gateway.max_queued_tokens,
                max_queued_tokens_per_tenant=settings.gateway.max_queued_tokens_per_tenant,
                waiting_timeout_ms=limits.waiting_timeout_ms,
            )
        )
        names[model.id] = (queue.name, tuple(recipe.name for recipe in recipes))
        owners.append(engine_deployment(f"Engine-{model.id}", model.engines).bind(recipes))
        owners.append(fair_queue_deployment(f"FairQueue-{model.id}").bind(queue, redis))
    gateway = serve.deployment(
        name="Gateway",
        num_replicas=1,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=120,
        graceful_shutdown_wait_loop_s=0.1,
    )(serve.ingress()(Gateway))
    return gateway.bind(settings, names, data_dir, embedded, owners)
