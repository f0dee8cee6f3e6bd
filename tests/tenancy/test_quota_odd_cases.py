"""Budgets and limits where two things happen at once: a month ends, a limit is lowered, a model costs nothing."""

from __future__ import annotations

import pytest
from conftest import ClockedStore, refused, take, tenant, usage
from pydantic import ValidationError
from redis.asyncio import Redis

from tenancy.limits import Used
from tenancy.models import Price, Tenant

pytestmark = pytest.mark.asyncio
DAY_US = 86_400_000_000
BUDGET = "local b = cmsgpack.unpack(redis.call('HGET', KEYS[1], ARGV[1])) return {b[2], b[3]}"


async def budget(redis: Redis, limit: str) -> list[int]:
    """[used, held] of the tenant's budget."""
    found: list[int] = await redis.eval(BUDGET, 1, "eh:v2:{alpha}:counts", f"tenant/{limit}")
    return found


@pytest.mark.parametrize(("limit", "days"), [("tokens_per_day", 0), ("tokens_per_month", 16)])
async def test_a_period_that_ends_with_holds_in_flight(
    clocked: ClockedStore, redis: Redis, limit: str, days: int
) -> None:
    """What ends later is charged when it ends, and what was held before is not held against the new period."""
    await clocked.advance(days * DAY_US + 6_400_000_000 - 10_000_000)  # ten seconds before the end
    who = tenant(**{limit: 100})
    settled, voided, lapsed = [await take(clocked, who, input_tokens=30) for _ in range(3)]
    for _ in range(2):
        await clocked.advance(12_000_000)
        await clocked.renew([settled, voided])
    whole = await take(clocked, who, input_tokens=100)
    assert await budget(redis, limit) == [0, 100], "all of the new period is there"
    await clocked.settle(settled, Used(20))
    await clocked.void(voided)
    await clocked.settle(lapsed, Used(25))
    assert await budget(redis, limit) == [45, 100]
    await clocked.settle(whole, Used(0))
    assert await budget(redis, limit) == [45, 0]
    assert (await refused(clocked, who, input_tokens=56)).retry_after_ms is not None
    await take(clocked, who, input_tokens=55)


async def test_a_budget_lowered_below_what_is_used(clocked: ClockedStore, redis: Redis) -> None:
    who = tenant(tokens_per_day=1000, tokens_per_minute=1000, max_concurrent_requests=4)
    holds = [await take(clocked, who, input_tokens=100) for _ in range(3)]
    lower = tenant(tokens_per_day=150, tokens_per_minute=120, max_concurrent_requests=1)
    assert (await refused(clocked, lower, input_tokens=1)).limit_name == "tokens_per_day"
    for hold in holds:
        await clocked.settle(hold, Used(40))
    assert await budget(redis, "tokens_per_day") == [120, 0]
    refusal = await refused(clocked, lower, input_tokens=30)
    assert (refusal.limit_name, refusal.retry_after_ms) == ("tokens_per_minute", 60_000)
    await clocked.advance(60_000_000)
    await take(clocked, lower, input_tokens=30)


async def test_using_more_than_was_held_never_makes_anything_negative(
    clocked: ClockedStore, redis: Redis
) -> None:
    who = tenant(tokens_per_day=1000, tokens_per_minute=1000, max_concurrent_requests=2)
    hold = await take(clocked, who, input_tokens=10, slots=2)
    await clocked.advance(31_000_000)
    await clocked.sweep("alpha")  # it lapses, and then ends after all
    await clocked.settle(hold, Used(300))
    await clocked.void(hold)
    assert await budget(redis, "tokens_per_day") == [300, 0]
    assert not await redis.hexists("eh:v2:{alpha}:counts", "tenant/max_concurrent_requests")
    probe = await take(clocked, who, slots=2)
    assert probe.tokens is not None and probe.tokens.remaining == 1000 - 300


async def test_a_model_without_a_price_to_pay_needs_no_budget(redis: Redis) -> None:
    clocked = ClockedStore(redis, prices={"m": Price(input=1.0), "free": Price()})
    await clocked.advance(0)
    who = tenant(cost_per_day=0.001)
    hold = await take(clocked, who, input_tokens=900)
    await clocked.settle(hold, Used(1500))  # more than there was
    assert (await refused(clocked, who, input_tokens=1)).limit_name == "cost_per_day"
    hold = await take(clocked, who, model="free", input_tokens=900)
    await clocked.settle(hold, Used(900))
    assert await usage(redis, model="free") == {"requests": 1, "input": 900}
    await clocked.aclose()


@pytest.mark.parametrize(
    "id",
    ["", "A", "-a", "_a", "a b", "a:b", "a|b", "a/b", "{a}", "a}b", "+directory", "\u00e4", "a\n", "a" * 65],
)
async def test_e01_ids_of_tenants_cannot_reach_into_other_keys(id: str) -> None:
    with pytest.raises(ValidationError):
        Tenant(id=id)


async def test_tenants_whose_ids_look_alike_share_nothing(clocked: ClockedStore, redis: Redis) -> None:
    """Nor do models and keys named like limits."""
    names = ["a", "a-b", "a_b", "ab", "gateways", "layout", "probe", "snapshot"]
    for id in names:
        who = tenant(id, requests_per_minute=1)
        await take(clocked, who)
        await refused(clocked, who)
    odd = ["m", "m/requests_per_minute", "model:m", "a:b/tokens_per_day"]
    one = {model: {"requests_per_minute": 1} for model in odd}
    who = Tenant.model_validate({"id": "odd", "model_limits": one})
    for model in odd:
        await take(clocked, who, model=model)
        await refused(clocked, who, model=model)
