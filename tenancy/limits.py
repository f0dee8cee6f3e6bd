"""Which limits a request must fit, and how much of each it takes: plain records, no Redis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tenancy.models import LimitName, Limits, OutagePolicy, Price, ServiceClass, Tenant, TokenWeights

MINUTE_US = 60_000_000
Kind = Literal["r", "t", "c", "b"]


@dataclass(frozen=True)
class Demand:
    """What a request is about to use. `output_tokens` is the estimate for all `slots` sequences."""

    request_id: str
    model: str = ""
    service_class: ServiceClass = "default"
    slots: int = 1
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Used:
    """What a request has used; `cached_tokens` are among the input. `timings` are milliseconds by name."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    outcome: str = "ok"
    timings: dict[str, float] | None = None


@dataclass(frozen=True)
class Check:
    """One limit, as the scripts see it: `field` names its state, `scope` is for people. Costs are 1e-9."""

    kind: Kind
    name: LimitName
    scope: str
    field: str
    limit: int
    outage: OutagePolicy
    weights: TokenWeights
    burst: int = 0

    @property
    def burst_span_us(self) -> int:
        return MINUTE_US * self.burst // self.limit if self.burst else 0

    def amount(self, tokens: Used, slots: int, price: int) -> int:
        """How much of this limit these tokens take."""
        if self.kind == "r":
            return 1
        if self.kind == "c":
            return slots
        if self.name in ("cost_per_day", "cost_per_month"):
            return price
        w = self.weights
        cached = w.input if w.cached_input is None else w.cached_input
        fresh = tokens.input_tokens - tokens.cached_tokens
        # Rounded first: 3 * 0.1 must not become 1 by the last bit of a float.
        return math.ceil(
            round(fresh * w.input + tokens.cached_tokens * cached + tokens.output_tokens * w.output, 6)
        )

    def reserve_amount(self, demand: Demand, price: int) -> int:
        """How much to reserve. An estimate of the output alone never makes a request too large for a rate."""
        whole = self.amount(_tokens(demand, demand.output_tokens), demand.slots, price)
        if self.kind != "t" or whole <= self.limit:
            return whole
        return max(self.limit, self.amount(_tokens(demand, 0), demand.slots, price))


def _tokens(demand: Demand, output: int) -> Used:
    return Used(input_tokens=demand.input_tokens, output_tokens=output)


def estimate_price(demand: Demand, price: Price | None) -> int:
    """In 1e-9 of the currency, as if nothing were cached."""
    return 0 if price is None else price.nano(demand.input_tokens, 0, demand.output_tokens)


def applicable(
    tenant: Tenant,
    model: str,
    service_class: ServiceClass,
    key_id: str = "",
    key_limits: Limits | None = None,
) -> list[tuple[str, str, Limits]]:
    """The blocks of limits a request must fit: (scope for people, scope in fields, limits)."""
    blocks = [("tenant", "tenant", tenant.limits)]
    if key_limits is not None:
        blocks.append(("API key", f"key:{key_id}", key_limits))
    if (of_model := tenant.model_limits.get(model)) is not None:
        blocks.append(("tenant for this model", f"model:{model}", of_model))
    if (of_class := tenant.class_limits.get(service_class)) is not None:
        blocks.append((f"tenant for {service_class} requests", f"class:{service_class}", of_class))
    return blocks


def checks(blocks: list[tuple[str, str, Limits]]) -> list[Check]:
    """Every limit of these blocks that Redis keeps."""
    return [check for block in blocks for check in _checks(*block)]


def _checks(scope: str, prefix: str, limits: Limits) -> Iterator[Check]:
    def check(kind: Kind, name: LimitName, limit: int, burst: int = 0) -> Check:
        policy = limits.outage_policy(name)
        return Check(kind, name, scope, f"{prefix}/{name}", limit, policy, limits.token_weights, burst)

    if limits.requests_per_minute is not None:
        burst = min(limits.requests_burst or 0, limits.requests_per_minute)
        yield check("r", "requests_per_minute", limits.requests_per_minute, burst)
    if limits.tokens_per_minute is not None:
        yield check("t", "tokens_per_minute", limits.tokens_per_minute)
    if limits.max_concurrent_requests is not None:
        yield check("c", "max_concurrent_requests", limits.max_concurrent_requests)
    if limits.tokens_per_day is not None:
        yield check("b", "tokens_per_day", limits.tokens_per_day)
    if limits.tokens_per_month is not None:
        yield check("b", "tokens_per_month", limits.tokens_per_month)
    if limits.cost_per_day is not None:
        yield check("b", "cost_per_day", round(limits.cost_per_day * 1e9))
    if limits.cost_per_month is not None:
        yield check("b", "cost_per_month", round(limits.cost_per_month * 1e9))
