"""A real redis-server for the room's tests, and a store whose scripts read the time from a key."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from tenancy.embedded_redis import EmbeddedRedis
from tenancy.models import Limits, Tenant
from tenancy.quota import PREFIX, Demand, Hold, QuotaRefusal, QuotaStore
from tenancy.redis import connect

PATIENT = "?socket_timeout=10&socket_connect_timeout=10"


def tenant(id: str = "alpha", **limits: Any) -> Tenant:
    return Tenant(id=id, limits=Limits.model_validate(limits))


def demand(**fields: Any) -> Demand:
    return Demand(**{"request_id": "r", "model": "m", **fields})


async def take(store: QuotaStore, who: Tenant, **fields: Any) -> Hold:
    hold = await store.reserve(who, demand(**fields))
    assert isinstance(hold, Hold), hold
    return hold


async def refused(store: QuotaStore, who: Tenant, **fields: Any) -> QuotaRefusal:
    refusal = await store.reserve(who, demand(**fields))
    assert isinstance(refusal, QuotaRefusal), refusal
    return refusal


async def usage(redis: Redis, id: str = "alpha", model: str = "m") -> dict[str, int]:
    """What the usage counters of a tenant and model sum up to."""
    sums: dict[str, int] = {}
    for field, value in (await redis.hgetall(f"{PREFIX}:{{{id}}}:usage")).items():
        parts = field.decode().split("|")
        if len(parts) == 3 and parts[1] == model:
            sums[parts[2]] = sums.get(parts[2], 0) + int(value)
    return sums


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float = 15.0) -> None:
    async def poll() -> None:
        while not await condition():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), within_s)


class ClockedStore(QuotaStore):
    """The store with its real scripts, except that `TIME` is a key the test sets."""

    def __init__(self, redis: Redis, **options: Any) -> None:
        super().__init__(redis, **options)
        self.redis = redis
        self.now_us = 0
        for script in (self._reserve, self._settle, self._void, self._renew):
            script.text = script.text.replace("redis.call('TIME')", "redis.call('HMGET', 'clock', 's', 'us')")
            script.sha = hashlib.sha1(script.text.encode()).hexdigest()

    async def advance(self, us: int) -> None:
        self.now_us += us
        seconds, rest = divmod(1_700_000_000_000_000 + self.now_us, 1_000_000)
        await self.redis.hset("clock", mapping={"s": seconds, "us": rest})


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url + PATIENT)
    await client.flushall()
    yield client
    await client.aclose()


@pytest_asyncio.fixture
async def store(redis: Redis) -> AsyncIterator[QuotaStore]:
    store = QuotaStore(redis)
    yield store
    await store.aclose()


@pytest_asyncio.fixture
async def clocked(redis: Redis) -> AsyncIterator[ClockedStore]:
    store = ClockedStore(redis)
    await store.advance(0)
    yield store
    await store.aclose()
