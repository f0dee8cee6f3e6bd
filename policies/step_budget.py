"""Tokens of one engine step: how many it may have, how many are kept for prefill, how tenants share them."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from policies.latency_model import StepEstimate, StepFeatures

PREFILL_FLOOR_TOKENS = 16
"""Tokens of a step that stay for prefill while any prefill waits, however many requests decode."""

_WEIGHT_UNIT = 1 << 16  # weights become integers, so that the split is exact
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: multiples of it spread evenly over any range


def prefill_floor(budget: int, waiting_prefill_tokens: int) -> int:
    """Tokens of a step's budget that decode must leave for prefill.

    Half the budget at most: a tiny budget stops neither of the two.
    """
    return min(PREFILL_FLOOR_TOKENS, waiting_prefill_tokens, budget // 2)


def decode_slack(
    now: float,
    *,
    first_token_at: float,
    last_token_at: float,
    output_tokens: int,
    tpot: float | None,
    itl: float | None,
) -> float | None:
    """Seconds until the next token of a decoding request is due; None without a target. All times in s.

    `tpot` is a target for the mean: token k is due k * tpot after the first one, so a request that is ahead
    has slack. One that is late is due half a period after its last token: it catches up at twice its pace at
    most, and does not starve prefill until it has. `itl` bounds each gap by itself.
    """
    due = [] if itl is None else [last_token_at + itl]
    if tpot is not None:
        due.append(max(first_token_at + output_tokens * tpot, last_token_at + tpot / 2))
    return min(due) - now if due else None


def step_token_budget(
    estimate: StepEstimate,
    *,
    decode_rows: int,
    decode_context: int,
    prefill_position: int,
    slack: float,
    max_num_batched_tokens: int,
) -> int:
    """Tokens of the largest step that nine times in ten ends within `slack` seconds, decode rows included.

    `prefill_position` is about where in their prompts the next chunks begin: later chunks attend to more.
    At least PREFILL_FLOOR_TOKENS beside the decode rows, at most `max_num_batched_tokens`. As in the dynamic
    chunking of Niyama (arXiv 2503.22562), with the margin learned instead of set.
    """
    decodes = estimate.upper_seconds(StepFeatures(decode_rows=decode_rows, decode_context=decode_context))
    per_token = estimate.per_prefill_token + estimate.per_prefill_context * max(prefill_position, 1)
    left = slack - decodes
    per_token *= 1.0 + estimate.residual
    if left <= 0.0:
        prefill = 0
    elif left >= per_token * max_num_batched_tokens:
        prefill = max_num_batched_tokens
    else:
        prefill = int(left / per_token)
    return min(decode_rows + max(prefill, PREFILL_FLOOR_TOKENS), max_num_batched_tokens)


def decode_batch_limit(estimate: StepEstimate, *, target: float, mean_context: float, limit: int) -> int:
    """Largest decode batch whose step, with the prefill floor in it, ends within `target` seconds; 1 to `limit`.

    The latency half of dynamic batching (arXiv 2503.05248), by model instead of by search.
    """
    fixed = estimate.upper_seconds(StepFeatures(prefill_tokens=PREFILL_FLOOR_TOKENS))
    per_row = estimate.per_decode_row + estimate.per_decode_context * mean_context
    left = target - fixed
    per_row *= 1.0 + estimate.residual
    if left <= 0.0:
        return 1
    if left >= per_row * limit:
        return limit
    return max(1, int(left / per_row))


def memory_batch_limit(
    *, mean_tokens: float, deviation: float, kv_tokens: int, limit: int, z: float = 0.5
) -> int:
    """Largest batch that hardly ever takes much more than `kv_tokens`; 1 to `limit`.

    At a random moment a running request holds `mean_tokens` of KV with a standard `deviation`, independently, so b of
    them hold about b * mean + z * deviation * sqrt(b): the memory half of dynamic batching (arXiv 2503.05248), which
    counts requests at their full length. That leaves half of the cache empty where outputs are long. An overflow
    costs one preemption, so the margin is small too.
    """
    if mean_tokens <= 0:
        return limit
    spread = z * deviation
    root = (sqrt(spread * spread + 4.0 * mean_tokens * kv_tokens) - spread) / (2.0 * mean_tokens)
    return max(1, min(limit, int(root * root)))


def split_prefill_budget(
    pending: Mapping[str, int],
    weights: Mapping[str, float],
    budget: int,
    rotation: int = 0,
    decoding: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Divide a step's prefill tokens among tenants: weighted max-min fairness of the step in whole tokens.

    `pending` holds the prefill tokens waiting per tenant, `weights` a positive weight for each of them. `decoding`
    are the tokens that tenants have in the step already, beside the budget: they count as part of a tenant's share.
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
    used = {tenant: (decoding or {}).get(tenant, 0) for tenant in demand}
    one = 1 if budget >= len(demand) else 0
    least = {tenant: used[tenant] + one for tenant in demand}
    most = {tenant: used[tenant] + demand[tenant] for tenant in demand}
    free = {tenant: max(1, round(weights[tenant] * _WEIGHT_UNIT)) for tenant in demand}
    split: dict[str, int] = {}
    left = budget + sum(used.values())
    while True:
        total_weight = sum(free.values())
        # Shares and bounds are multiplied by total_weight: integers, no rounding.
        too_small = {t for t, w in free.items() if left * w < least[t] * total_weight}
        too_large = {t for t, w in free.items() if left * w > most[t] * total_weight}
        if not too_small and not too_large:
            break
        violation = sum(least[t] * total_weight - left * free[t] for t in too_small) + sum(
            most[t] * total_weight - left * free[t] for t in too_large
        )
        frozen = (too_small if violation >= 0 else set()) | (too_large if violation <= 0 else set())
        for tenant in frozen:
            split[tenant] = least[tenant] if tenant in too_small else most[tenant]
            left -= split[tenant]
            del free[tenant]
        if not free:
            break
    if free:
        split.update(_round_shares(free, left, rotation))
    return {tenant: split[tenant] - used[tenant] for tenant in demand}


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
