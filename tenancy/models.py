"""Tenants, their limits and prices, as the config file and the admin API state them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from tenancy.keys import MAX_KEY_CHARS, is_well_formed

ServiceClass = Literal["interactive", "default", "batch"]
ServiceTier = Literal["priority", "default", "flex"]
OutagePolicy = Literal["closed", "open", "local_share"]
LimitName = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
    "cost_per_day",
    "cost_per_month",
]
BUDGETS: tuple[LimitName, ...] = ("tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month")

_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_Tokens = Annotated[int, Field(ge=1, le=10**12)]
_Cost = Annotated[
    float, Field(gt=0, le=1_000_000, allow_inf_nan=False)
]  # exact in Lua's doubles, in 1e-9 units
_Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
TenantId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
_ShareWeight = Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)]  # counters stay exact
_KvShare = Annotated[float, Field(gt=0, le=1)]
_Names = Annotated[tuple[str, ...], Field(strict=False)]
_ServiceTiers = Annotated[tuple[ServiceTier, ...], Field(strict=False)]
_Unattainable = Literal["refuse", "demote"]


class _Model(BaseModel):
    # strict: a quoted number in a hand-written file is a mistake. Inputs stay out of errors: they may be
    # keys.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class TokenWeights(_Model):
    """What a token counts against limits in tokens. A cached input token counts as input unless stated."""

    input: _Weight = 1.0
    cached_input: _Weight | None = None
    output: _Weight = 1.0


class Limits(_Model):
    """Limits of a tenant, of one of its models or classes, or of a key; None is no limit.

    No 60 s ever see more than `requests_per_minute` or `tokens_per_minute`. `requests_burst` spreads the
    requests out: no more than that many in 60 s * burst / limit. `max_concurrent_requests` counts queued and
    running sequences: each of n and each prompt of a list is one. Days and months are UTC; `cost_*` is in
    the currency of the price table. `max_input_tokens` and `max_output_tokens` bound one prompt and one
    answer.

    `on_outage` is what applies while Redis does not answer, for all limits here or by name: `closed` refuses
    (the default), `open` admits, `local_share` admits the limit divided by the number of gateways. A budget
    cannot be shared out, since what is left of it is known to Redis alone.
    """

    requests_per_minute: _Count | None = None
    requests_burst: _Count | None = None
    tokens_per_minute: _Tokens | None = None
    token_weights: TokenWeights = TokenWeights()
    max_concurrent_requests: _Count | None = None
    max_input_tokens: _Count | None = None
    max_output_tokens: _Count | None = None
    tokens_per_day: _Tokens | None = None
    tokens_per_month: _Tokens | None = None
    cost_per_day: _Cost | None = None
    cost_per_month: _Cost | None = None
    on_outage: OutagePolicy | dict[LimitName, OutagePolicy] = "closed"

    @model_validator(mode="after")
    def _consistent(self) -> Limits:
        if self.requests_burst is not None and self.requests_per_minute is None:
            raise ValueError("requests_burst is set without requests_per_minute")
        for name in BUDGETS:
            if getattr(self, name) is not None and self.outage_policy(name) == "local_share":
                raise ValueError(f"on_outage of {name} cannot be local_share; allowed: closed, open")
        return self

    def outage_policy(self, name: LimitName) -> OutagePolicy:
        """What applies to this limit while Redis does not answer."""
        if isinstance(self.on_outage, str):
            return self.on_outage
        return self.on_outage.get(name, "closed")

    @property
    def has_cost_budget(self) -> bool:
        """Whether the use of a model without a price would escape a limit."""
        return self.cost_per_day is not None or self.cost_per_month is not None


class Price(_Model):
    """Price of a model, per million tokens. A cached input token costs what input costs unless stated."""

    input: _Cost | Literal[0] = 0
    cached_input: _Cost | Literal[0] | None = None
    output: _Cost | Literal[0] = 0

    def nano(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Price of one request in 1e-9 of the currency, rounded up; `cached_tokens` are among the input."""
        cached = self.input if self.cached_input is None else self.cached_input
        pico = (
            (input_tokens - cached_tokens) * round(self.input * 1e6)
            + cached_tokens * round(cached * 1e6)
            + output_tokens * round(self.output * 1e6)
        )
        return -(-pico // 1000)


class Tier(_Model):
    """What tenants of one tier have where they do not say otherwise (tenancy.tiers). None leaves it to the tenant."""

    weight: _ShareWeight | None = None
    shared_prefix_cache: bool | None = None
    models: _Names | None = None
    limits: Limits = Limits()
    model_limits: dict[str, Limits] = {}
    class_limits: dict[ServiceClass, Limits] = {}
    service_tiers: _ServiceTiers | None = None
    unattainable_deadline: _Unattainable | None = None
    kv_share: _KvShare | None = None


class Tenant(_Model):
    """One tenant. `models` None allows every model. `demo` marks keys that everybody knows.

    A request must fit `limits`, those of its model and those of its class. `api_keys` is filled in the
    config only: the directory keeps hashes and hands out tenants without keys. A disabled tenant's keys are
    treated as unknown. `deleted` marks one that was removed at run time, so that the config's is not used;
    `generation` counts how many of this id were before this one. With
    `shared_prefix_cache` its prompts use cached prefixes of all tenants that have set it: each of them can tell
    from the time to a first token whether another sent the same beginning. `service_tiers` are those that its
    requests may ask for. One whose deadline cannot be promised is refused, or demoted: it goes on as batch work.
    `kv_share` is the part of an engine's KV pages that it may hold while another tenant waits. `tier` names a Tier of
    the config, whose values hold where the tenant has none of its own.
    """

    id: TenantId
    name: Annotated[str, Field(max_length=200)] | None = None
    tier: TenantId | None = None
    weight: _ShareWeight = 1.0
    enabled: bool = True
    deleted: bool = False
    demo: bool = False
    generation: Annotated[int, Field(ge=0)] = 0
    shared_prefix_cache: bool = False
    models: _Names | None = None
    limits: Limits = Limits()
    model_limits: dict[str, Limits] = {}
    class_limits: dict[ServiceClass, Limits] = {}
    service_tiers: _ServiceTiers = ("priority", "default", "flex")
    unattainable_deadline: _Unattainable = "refuse"
    kv_share: _KvShare = 1.0
    api_keys: Annotated[tuple[SecretStr, ...], Field(strict=False, repr=False)] = ()

    @field_validator("api_keys")
    @classmethod
    def _keys_well_formed(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for index, key in enumerate(keys):
            if not is_well_formed(key.get_secret_value()):
                raise ValueError(
                    f"key {index} is not allowed; allowed: eh_<id>_<secret> of letters, digits, '_' and '-', "
                    f"at most {MAX_KEY_CHARS} characters"
                )
        return keys

    def may_use(self, model: str) -> bool:
        """Whether the tenant may use the model with this id."""
        return self.models is None or model in self.models


class KeyRecord(_Model):
    """A key as it is stored: its keyed hash (64 hex digits), whose it is, and what it opens.

    `models` and `routes` None are all that the tenant may use. Times are seconds since 1970.
    """

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
    tenant: TenantId
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    name: Annotated[str, Field(max_length=200)] | None = None
    models: _Names | None = None
    routes: _Names | None = None
    limits: Limits | None = None
    created_at: int
    expires_at: int | None = None
    revoked: bool = False


def check_unambiguous(tenants: Iterable[Tenant]) -> None:
    """Raise ValueError, without naming a key, when two tenants share an id or a key."""
    owners: dict[str, str] = {}
    ids: set[str] = set()
    for tenant in tenants:
        if tenant.id in ids:
            raise ValueError(f"two tenants have the id {tenant.id!r}; ids must be unique")
        ids.add(tenant.id)
        for index, key in enumerate(tenant.api_keys):
            owner = owners.setdefault(key.get_secret_value(), tenant.id)
            if owner != tenant.id:
                raise ValueError(
                    f"api_keys[{index}] of tenant {tenant.id!r} is also a key of tenant {owner!r}; "
                    "a key belongs to one tenant"
                )


def unpriced_model(tenant: Tenant, models: Iterable[str], prices: Mapping[str, Price]) -> str | None:
    """A model whose use would escape a budget in cost of this tenant, if there is one."""
    everywhere = any(limits.has_cost_budget for limits in (tenant.limits, *tenant.class_limits.values()))
    for model in models:
        own = tenant.model_limits.get(model)
        if model not in prices and (everywhere or (own is not None and own.has_cost_budget)):
            return model
    return None
