"""Our settings in a config: `args`, and the Gateway's `user_config`.

`args` is what needs a restart, since Serve hashes it into the code version of every deployment; `user_config`
is what reloads without one. Unknown keys are refused at every level.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from policies.fair_queue import QueuePolicy
from policies.guardrails import ProtectionLines
from serve_app.config_errors import ConfigError, Loc, describe
from tenancy.models import Price, Tenant, TenantId, Tier, check_unambiguous
from tenancy.redis import SCHEMES, check_url
from tenancy.tiers import with_tier

REDIS_URL_VARIABLE = "EVENHAND_REDIS_URL"
"""Stands in for a `redis_url` that is null: Ray writes `args`, passwords included, into its log."""

EngineKind = Literal["auto", "native", "torch", "stub"]

_MOST = 2**31 - 1
_Count = Annotated[int, Field(ge=1, le=_MOST)]
_ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=128)]


class _Settings(BaseModel):
    # strict: a quoted number or a "yes" is a mistake in a file written by hand.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class KvCacheSettings(_Settings):
    """Size of an engine's KV pool: `pages` or `memory_gb` (GiB), or neither for what suits the device."""

    page_size: Literal[16] = 16
    pages: Annotated[int, Field(ge=2, le=_MOST)] | None = None
    memory_gb: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_size(self) -> KvCacheSettings:
        if self.pages is not None and self.memory_gb is not None:
            raise ValueError("pages and memory_gb cannot both be set")
        return self


@dataclass(frozen=True)
class SchedulerLimits:
    """Scheduler settings with the device's defaults filled in. `max_model_len` None is the model's own."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    prefill_chunk_size: int
    kv_cache_utilization_limit: float
    kv_watermark: float
    async_scheduling: bool
    waiting_timeout_ms: int
    policy: QueuePolicy
    locality_window: float
    request_level_batching: bool
    prefill_first: bool


class SchedulerSettings(_Settings):
    """Limits of one engine's scheduler and the order of its fair queue. None means the device's default.

    `locality_window` is in tokens of service per weight: so far a request with a cached prefix may go before its turn.
    `request_level_batching` and `prefill_first` are habits of older engines, for comparison.
    """

    max_num_seqs: _Count | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=_MOST)] | None = None
    max_model_len: _Count | None = None
    prefill_chunk_size: _Count | None = None
    kv_cache_utilization_limit: Annotated[float, Field(gt=0, le=1)] = 0.95
    kv_watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    async_scheduling: bool = False
    waiting_timeout_ms: _Count | None = None
    policy: QueuePolicy = "vtc"
    locality_window: Annotated[float, Field(ge=0)] = 0.0
    request_level_batching: bool = False
    prefill_first: bool = False

    def for_device(self, device: Literal["cpu", "cuda"]) -> SchedulerLimits:
        """The limits on `device`. A small token budget costs little on a CPU, and bounds gaps."""
        tokens = self.max_num_batched_tokens or (64 if device == "cpu" else 2048)
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs or (32 if device == "cpu" else 256),
            max_num_batched_tokens=tokens,
            max_model_len=self.max_model_len,
            prefill_chunk_size=min(self.prefill_chunk_size or tokens, tokens),
            kv_cache_utilization_limit=self.kv_cache_utilization_limit,
            kv_watermark=self.kv_watermark,
            async_scheduling=self.async_scheduling,
            waiting_timeout_ms=self.waiting_timeout_ms or (60_000 if device == "cpu" else 30_000),
            policy=self.policy,
            locality_window=self.locality_window,
            request_level_batching=self.request_level_batching,
            prefill_first=self.prefill_first,
        )


class ModelSettings(_Settings):
    """One base model and the pool of engines that serves it.

    `source` is `package:NAME` (an installed package that carries a GGUF file), a local directory, a `.gguf`
    file or a hub id, whose token comes from the environment as HF_TOKEN: Ray writes `args` to its logs.
    `threads` None lets the engine choose.
    """

    id: _ModelName
    aliases: list[_ModelName] = []
    source: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    engine: EngineKind = "auto"
    engines: _Count = 1
    tensor_parallel: Literal[1] = 1
    attention: Literal["auto", "flashinfer", "reference"] = "auto"
    threads: _Count | None = None
    kv_cache: KvCacheSettings = KvCacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()


class GatewaySettings(_Settings):
    """Caps: requests and prompt tokens that wait in a model's fair queue, in all and of one tenant; bytes of a body.

    `cors_origins`: origins whose pages may call the API from a browser, such as https://console.example.com.
    `max_failed_logins_per_minute` of one source with wrong keys; `trusted_proxies` are addresses or networks of load
    balancers in front, whose X-Forwarded-For tells sources apart.
    """

    max_queued_requests: _Count = 1024
    max_queued_per_tenant: _Count = 512
    max_queued_tokens: _Count = 8_000_000
    max_queued_tokens_per_tenant: _Count = 4_000_000
    max_request_bytes: Annotated[int, Field(ge=1024, le=_MOST)] = 4 * 1024 * 1024
    cors_origins: list[Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?$")]] = []
    max_failed_logins_per_minute: Annotated[int, Field(ge=1, le=10_000)] | None = 60
    trusted_proxies: list[str] = []

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"{error}; allowed: addresses and networks such as 10.0.0.0/8") from None
        return proxies


class TracingSettings(_Settings):
    """Where spans go. `endpoint` (OTLP over HTTP) None is what OpenTelemetry's environment variables say."""

    exporter: Literal["none", "otlp", "file"] = "none"
    endpoint: str | None = None
    path: str | None = None
    sampling_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _file_has_path(self) -> TracingSettings:
        if self.exporter == "file" and self.path is None:
            raise ValueError("exporter 'file' needs a path")
        return self


class TelemetrySettings(_Settings):
    """Spans and the access log (one JSON line per request)."""

    tracing: TracingSettings = TracingSettings()
    access_log: bool = True


class AppSettings(_Settings):
    """`applications[].args`: what needs a restart.

    `redis_url` None runs an embedded Redis below `data_dir`; `data_dir` None is `var/<HTTP port>` below the
    working directory, so that two instances never share one.
    """

    models: Annotated[list[ModelSettings], Field(min_length=1)]
    gateway: GatewaySettings = GatewaySettings()
    redis_url: str | None = Field(default=None, repr=False)
    data_dir: Annotated[str, Field(min_length=1)] | None = None
    telemetry: TelemetrySettings = TelemetrySettings()

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str | None) -> str | None:
        if url is not None:
            if not url.startswith(SCHEMES):
                raise ValueError(f"the value given is not allowed; allowed: null, or {', '.join(SCHEMES)}")
            check_url(url)
        return url

    @field_validator("models")
    @classmethod
    def _names_unique(cls, models: list[ModelSettings]) -> list[ModelSettings]:
        seen: set[str] = set()
        for name in (name for model in models for name in (model.id, *model.aliases)):
            if name in seen:
                raise ValueError(f"two models are named {name!r}; ids and aliases must be unique")
            seen.add(name)
        return models

    def data_path(self, port: int) -> Path:
        """The data directory of the instance that listens on `port`, absolute."""
        return Path(self.data_dir or f"var/{port}").expanduser().resolve()


class AdminSettings(_Settings):
    """The admin API. `keys` by the name that the audit shows; with `allow_remote` also where other machines can
    reach the server."""

    keys: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")], Annotated[SecretStr, Field(min_length=24)]
    ]
    allow_remote: bool = False


_Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]


class SloSettings(_Settings):
    """Protection lines of each pool; crossed, load is shed step by step (policies.guardrails). None is no line.

    Steps are also cut so that gaps between tokens stay below `itl_p95_ms`.
    """

    ttft_p95_ms: _Milliseconds | None = None
    itl_p95_ms: _Milliseconds | None = None
    queue_wait_p95_ms: _Milliseconds | None = None
    kv_cache_utilization_max: _Share | None = None
    admission_reject_rate_max: _Share | None = None

    def lines(self) -> ProtectionLines:
        return ProtectionLines(**self.model_dump())


class UserConfig(_Settings):
    """`deployments[Gateway].user_config`: what reloads without a restart. Tenants are the bootstrap set, `tiers` what
    they and those made at run time may inherit.

    `prices` are per million tokens, by model id. `admin` None turns the admin API off. `metrics_key` opens
    /metrics; None opens it to nobody. It is here and not in `args`, which Ray writes to its logs.
    """

    tenants: list[Tenant] = []
    tiers: dict[TenantId, Tier] = {}
    prices: dict[str, Price] = {}
    slo: SloSettings = SloSettings()
    admin: AdminSettings | None = None
    metrics_key: Annotated[SecretStr, Field(min_length=16)] | None = None

    @field_validator("tenants")
    @classmethod
    def _unambiguous(cls, tenants: list[Tenant]) -> list[Tenant]:
        check_unambiguous(tenants)
        for tenant in tenants:
            if "api_keys" in tenant.model_fields_set and not tenant.api_keys:
                raise ValueError(
                    f"tenant {tenant.id!r}: api_keys is empty; give it a key or leave api_keys out"
                )
        return tenants

    @model_validator(mode="after")
    def _fit_their_tiers(self) -> UserConfig:
        self.treated_tenants()
        return self

    def treated_tenants(self) -> list[Tenant]:
        """The tenants with what they have from their tiers."""
        return [with_tier(tenant, self.tiers) for tenant in self.tenants]


_M = TypeVar("_M", bound=BaseModel)


def parse_args(data: Any, where: Loc = ("args",), name: str = "config") -> AppSettings:
    """`args` as settings; EVENHAND_REDIS_URL stands in for a null `redis_url`. Raises ConfigError."""
    settings = _parse(AppSettings, data, where, name)
    url = os.environ.get(REDIS_URL_VARIABLE)
    if settings.redis_url is not None or not url:
        return settings
    return _parse(AppSettings, {**data, "redis_url": url}, (REDIS_URL_VARIABLE,), "environment")


def parse_user_config(data: Any, where: Loc = ("user_config",), name: str = "config") -> UserConfig:
    """A Gateway's `user_config`. Raises ConfigError."""
    return _parse(UserConfig, data, where, name)


def _parse(model: type[_M], data: Any, where: Loc, name: str) -> _M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe(error, model, data, where)}") from None
