"""Tokens of one engine step: how many are kept for prefill, and how tenants share them."""

from __future__ import annotations

from collections.abc import Mapping

PREFILL_FLOOR_TOKENS = 16
"""Tokens of a step that stay for prefill while any prefill waits, however many requests decode."""

_WEIGHT_UNIT = 1 << 16  # weights become integers, so that the split is exact
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: multiples of it spread evenly over any range


def prefill_floor(budget: int, waiting_prefill_tokens: int) -> int:
    """Tokens of a step's budget that decode must leave for prefill.

    Half the budget at most: a tiny budget stops neither of the two.
    """
    return min(PREFILL_FLOOR_TOKENS, waiting_prefill_tokens, budget // 2)


def split_prefill_budget(
    pending: Mapping[str, int], weights: Mapping[str, float], budget: int, rotation: int = 0
) -> dict[str, int]:
    """Divide a step's prefill tokens among tenants: weighted max-min fairness in whole tokens.

    `pending` holds the prefill tokens waiting per tenant, `weights` a positive weight for each of them.
    Returns an entry for each tenant with pending work. They sum to min(budget, total pending), none is more
    than what is pending, and each is at least 1 if the budget has that many tokens. `rotation` is a number
    that the caller raises each step: over many steps a tenant gets exactly its share, fractions of a token
    included.

    The bounds are resolved as in CSS Flexible Box Layout, section 9.7 (freeze the violations of the kind that
    weighs more, divide the rest again); fractions are rounded by systematic sampling.

    Raises KeyError for a missing weight, ValueError for one that is not positive.
    """
    demand = {tenant: tokens for tenant, tokens in pending.items() if tokens > 0}
    if any(weights[tenant] <= 0 for tenant in demand):
        raise ValueError("weights must be positive")
    if sum(demand.values()) <= budget:
        return demand
    if budget <= 0:
        return dict.fromkeys(demand, 0)
    floor = 1 if budget >= len(demand) else 0
    free = {tenant: max(1, round(weights[tenant] * _WEIGHT_UNIT)) for tenant in demand}
    split: dict[str, int] = {}
    left = budget
    while True:
        total_weight = sum(free.values())
        # Shares and bounds are multiplied by total_weight: integers, no rounding.
        too_small = {t for t, w in free.items() if left * w < floor * total_weight}
        too_large = {t for t, w in free.items() if left * w > demand[t] * total_weight}
        if not too_small and not too_large:
            break
        violation = sum(floor * total_weight - left * free[t] for t in too_small) + sum(
            demand[t] * total_weight - left * free[t] for t in too_large
        )
        frozen = (too_small if violation >= 0 else set()) | (too_large if violation <= 0 else set())
        for tenant in frozen:
            split[tenant] = floor if tenant in too_small else demand[tenant]
            left -= split[tenant]
            del free[tenant]
        if not free:
            break
    if free:
        split.update(_round_shares(free, left, rotation))
    return {tenant: split[tenant] for tenant in demand}


def _round_shares(weights: Mapping[str, int], tokens: int, rotation: int) -> dict[str, int]:
    """Whole tokens in proportion to the weights, each rounded down or up, summing to `tokens`."""
    total_weight = sum(weights.values())
    offset = ((rotation * _GOLDEN) & 0xFFFFFFFF) * total_weight >> 32
    shares: dict[str, int] = {}
    position, given = offset, 0
    for tenant, weight in weights.items():
        position += tokens * weight
        shares[tenant] = position // total_weight - given
        given += shares[tenant]
    return shares
