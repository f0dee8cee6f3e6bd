"""What a tenant has from its tier, and what it says itself."""

from __future__ import annotations

from typing import Any

import pytest

from tenancy.models import Limits, Tenant, Tier
from tenancy.tiers import with_tier

GOLD = Tier(
    weight=4.0,
    models=("a", "b"),
    limits=Limits(requests_per_minute=60, requests_burst=10, tokens_per_day=1000),
    model_limits={"a": Limits(tokens_per_minute=5)},
    class_limits={"batch": Limits(max_concurrent_requests=2)},
    service_tiers=("default",),
    unattainable_deadline="demote",
    kv_share=0.5,
    shared_prefix_cache=True,
)


def treated(**stated: Any) -> Tenant:
    return with_tier(Tenant.model_validate({"id": "t", "tier": "gold", **stated}), {"gold": GOLD})


def test_every_value_of_a_tier_reaches_its_tenant() -> None:
    assert set(Tier.model_fields) <= set(Tenant.model_fields)
    found = treated()
    for name in Tier.model_fields:
        assert getattr(found, name) == getattr(GOLD, name), name
        assert name in GOLD.model_fields_set, "or the line above says nothing"
    bare = Tenant(id="t")
    assert with_tier(bare, {"gold": GOLD}) is bare


def test_a_tenant_overrides_value_by_value_and_limit_by_limit() -> None:
    found = treated(
        weight=1.0,
        models=None,
        limits={"requests_per_minute": 5, "tokens_per_day": None},
        model_limits={"a": {"max_concurrent_requests": 1}, "b": {"tokens_per_day": 9}},
        class_limits={"batch": {"max_concurrent_requests": 7}},
    )
    assert found.weight == 1.0, "a default that was stated is an override too"
    assert found.models == ("a", "b"), "null is nothing of its own"
    assert found.limits == Limits(requests_per_minute=5, requests_burst=10)
    assert found.model_limits == {
        "a": Limits(tokens_per_minute=5, max_concurrent_requests=1),
        "b": Limits(tokens_per_day=9),
    }
    assert found.class_limits["batch"].max_concurrent_requests == 7


def test_what_does_not_go_together_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tenant 't': there is no tier 'silver'; allowed: gold"):
        with_tier(Tenant(id="t", tier="silver"), {"gold": GOLD})
    with pytest.raises(ValueError, match="the config has no tiers"):
        with_tier(Tenant(id="t", tier="silver"), {})
    message = "tenant 't' with tier 'gold': on_outage of tokens_per_day cannot be local_share"
    with pytest.raises(ValueError, match=message):
        treated(limits={"on_outage": "local_share"})
