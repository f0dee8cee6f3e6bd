"""One run per idempotency key, whoever asks, and one answer for all."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tenancy import idempotency
from tenancy.guarded_redis import GuardedRedis
from tenancy.idempotency import Claim, Claimed, claim


@pytest.fixture
def guarded(redis: Redis) -> GuardedRedis:
    return GuardedRedis(redis, "probe")


async def test_one_of_many_runs_and_all_get_its_answer(guarded: GuardedRedis) -> None:
    claims = await asyncio.gather(*(claim(guarded, "alpha", "k", "request") for _ in range(20)))
    [mine] = [c for c in claims if isinstance(c, Claim)]
    assert claims.count(Claimed.RUNNING) == 19
    await mine.keep()
    assert await claim(guarded, "alpha", "k", "request") is Claimed.RUNNING
    await mine.answer('{"text":"é"}'.encode())
    assert await claim(guarded, "alpha", "k", "request") == '{"text":"é"}'.encode()


async def test_another_request_with_the_key_is_a_conflict(guarded: GuardedRedis) -> None:
    mine = await claim(guarded, "alpha", "k", "request")
    assert await claim(guarded, "alpha", "k", "other") is Claimed.CONFLICT
    assert isinstance(mine, Claim)
    await mine.answer(b"{}")
    assert await claim(guarded, "alpha", "k", "other") is Claimed.CONFLICT


async def test_keys_are_a_tenants_own(guarded: GuardedRedis) -> None:
    mine = await claim(guarded, "alpha", "k", "request")
    assert isinstance(mine, Claim)
    await mine.answer(b"{}")
    assert isinstance(await claim(guarded, "beta", "k", "request"), Claim)


async def test_without_an_answer_the_key_is_free(guarded: GuardedRedis) -> None:
    for end in (lambda c: c.drop(), lambda c: c.answer(b"x" * (idempotency.MAX_ANSWER_BYTES + 1))):
        mine = await claim(guarded, "alpha", "k", "request")
        assert isinstance(mine, Claim)
        await end(mine)
    assert isinstance(await claim(guarded, "alpha", "k", "request"), Claim)


async def test_a_lapsed_claim_changes_nothing(
    guarded: GuardedRedis, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "LEASE_MS", 20)
    lapsed = await claim(guarded, "alpha", "k", "request")
    assert isinstance(lapsed, Claim)
    monkeypatch.setattr(idempotency, "LEASE_MS", 30_000)
    while await redis.exists(lapsed.key):
        await asyncio.sleep(0.01)
    second = await claim(guarded, "alpha", "k", "request")
    assert isinstance(second, Claim)
    await lapsed.answer(b"late")
    await lapsed.drop()
    assert await claim(guarded, "alpha", "k", "request") is Claimed.RUNNING
    await second.answer(b"right")
    assert await claim(guarded, "alpha", "k", "request") == b"right"
    assert 0 < await redis.pttl(second.key) <= idempotency.KEEP_MS
