"""Snapshots in a real Redis."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tenancy.redis import connect
from tenancy.snapshots import KEPT_FOR, SnapshotError, SnapshotStore


async def test_the_last_one_saved_is_loaded_and_forgotten_in_the_end(redis: Redis) -> None:
    store = SnapshotStore(redis)
    assert await store.load("a") is None
    await store.save("a", "first")
    await store.save("a", "sécond")
    await store.save("b", "other")
    assert await store.load("a") == "sécond"
    [key] = [key async for key in redis.scan_iter("*snapshot:a")]
    assert 0 < await redis.ttl(key) <= KEPT_FOR.total_seconds()


async def test_without_redis_it_says_so() -> None:
    store = SnapshotStore(connect("redis://127.0.0.1:1"))
    with pytest.raises(SnapshotError):
        await store.load("a")
    with pytest.raises(SnapshotError):
        await store.save("a", "text")
    await store.aclose()
