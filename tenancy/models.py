"""Tenants and their limits, as the config file states them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from tenancy.keys import MAX_KEY_CHARS, is_well_formed

_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Model(BaseModel):
    # strict: a quoted number in a hand-written file is a mistake. Inputs stay out of errors: they may be
    # keys.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class TenantLimits(_Model):
    """Limits of one tenant; None is no limit.

    `requests_burst` is how many requests may come at once (default: `requests_per_minute`). No window of
    60 s ever sees more than requests_per_minute + requests_burst. `max_concurrent_requests` counts queued
    and running sequences: each of n and each prompt of a list is one.
    """

    requests_per_minute: _Count | None = None
    requests_burst: _Count | None = None
    max_concurrent_requests: _Count | None = None

    @model_validator(mode="after")
    def _burst_needs_rate(self) -> TenantLimits:
        if self.requests_burst is not None and self.requests_per_minute is None:
            raise ValueError("requests_burst is set without requests_per_minute")
        return self


class Tenant(_Model):
    """One tenant. `models` None allows every model. `demo` marks keys that everybody knows.

    `api_keys` is filled in the config only: the directory keeps hashes and hands out tenants without keys.
    A disabled tenant's keys are treated as unknown.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    name: Annotated[str, Field(max_length=200)] | None = None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    enabled: bool = True
    demo: bool = False
    models: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    limits: TenantLimits = TenantLimits()
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


def has_demo_keys(tenants: Iterable[Tenant]) -> bool:
    """Whether any tenant is marked as a demo: such keys must not be reachable from other machines."""
    return any(tenant.demo and tenant.api_keys for tenant in tenants)
