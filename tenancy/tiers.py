"""Tiers: named sets of values that tenants inherit and may override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from tenancy.models import Limits, Tenant, Tier

_Name = TypeVar("_Name", bound=str)


def with_tier(tenant: Tenant, tiers: Mapping[str, Tier]) -> Tenant:
    """The tenant as it is treated: a value of its own stands, else its tier's, else the default.

    Limits are inherited one by one, also those of a model or a class; one that the tenant sets to None is no limit.
    Raises ValueError for a tier that is not there, and where limits of both do not go together.
    """
    if tenant.tier is None:
        return tenant
    tier = tiers.get(tenant.tier)
    if tier is None:
        raise ValueError(f"tenant {tenant.id!r}: there is no tier {tenant.tier!r}; {_there_are(tiers)}")
    try:
        inherited: dict[str, Any] = {
            "limits": _merged(tenant.limits, tier.limits),
            "model_limits": _merged_each(tenant.model_limits, tier.model_limits),
            "class_limits": _merged_each(tenant.class_limits, tier.class_limits),
        }
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"tenant {tenant.id!r} with tier {tenant.tier!r}: {reason}") from None
    for name in Tier.model_fields.keys() - inherited.keys():
        own, of_tier = getattr(tenant, name), getattr(tier, name)
        if of_tier is not None and (name not in tenant.model_fields_set or own is None):
            inherited[name] = of_tier
    return tenant.model_copy(update=inherited)


def _there_are(tiers: Mapping[str, Tier]) -> str:
    return f"allowed: {', '.join(tiers)}" if tiers else "the config has no tiers"


def _merged(own: Limits, base: Limits) -> Limits:
    """Checked as a whole."""
    if not own.model_fields_set or not base.model_fields_set:
        return own if own.model_fields_set else base
    values = {name: getattr(base, name) for name in base.model_fields_set}
    return Limits.model_validate(values | {name: getattr(own, name) for name in own.model_fields_set})


def _merged_each(own: Mapping[_Name, Limits], base: Mapping[_Name, Limits]) -> dict[_Name, Limits]:
    none = Limits()
    return {name: _merged(own.get(name, none), base.get(name, none)) for name in {**base, **own}}
