"""A loop that is held up does not make an outage of a Redis that is well; a Redis that is not there still is one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from conftest import demand, tenant
from redis.asyncio import Redis

from tenancy.embedded_redis import EmbeddedRedis
from tenancy.loop_time import within_loop_time
from tenancy.quota import Hold, QuotaStore, QuotaUnavailable
from tenancy.redis import connect

pytestmark = pytest.mark.asyncio
WHO = tenant(requests_per_minute=1_000_000, max_concurrent_requests=1_000)


class Late:
    """Holds the loop up in every turn, for `seconds` each."""

    def __init__(self, seconds: float, turns: int) -> None:
        self._seconds, self.turns = seconds, turns

    def turn(self) -> None:
        time.sleep(self._seconds)
        self.turns -= 1
        if self.turns:
            asyncio.get_running_loop().call_soon(self.turn)


@pytest_asyncio.fixture
async def store(redis_url: str, redis: Redis) -> AsyncIterator[QuotaStore]:
    """On a client with the timeouts of the product."""
    client = connect(redis_url)
    store = QuotaStore(client)
    yield store
    await store.aclose()
    await client.aclose()


@pytest.mark.parametrize("warm", [False, True], ids=["connecting", "connected"])
async def test_e06_a_loop_held_up_for_longer_than_the_timeout_is_no_outage(
    store: QuotaStore, warm: bool
) -> None:
    if warm:
        assert isinstance(await store.reserve(WHO, demand()), Hold)
    calls = [asyncio.create_task(store.reserve(WHO, demand(request_id=f"r{i}"))) for i in range(40)]
    late = Late(0.2, 10)
    asyncio.get_running_loop().call_soon(late.turn)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [answer for answer in answers if not isinstance(answer, Hold)] == []
    assert store.healthy and store.owed == 0


async def test_e06_a_server_that_freezes_is_noticed_at_once(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        client = connect(server.url)
        pid = int((await client.info("server"))["process_id"])
        os.kill(pid, signal.SIGSTOP)
        # Running again whatever happens here: the server is stopped by a signal of its own.
        awake = threading.Timer(10, os.kill, (pid, signal.SIGCONT))
        awake.start()
        store = QuotaStore(client, probe_interval_s=0.05)
        started = time.monotonic()
        with pytest.raises(QuotaUnavailable):
            await store.reserve(WHO, demand())
        assert time.monotonic() - started < 2.0, "two answers of 100 ms each"
        with pytest.raises(QuotaUnavailable):
            await store.reserve(WHO, demand())
        assert not store.healthy
        awake.cancel()
        os.kill(pid, signal.SIGCONT)
        while not store.healthy:
            await asyncio.sleep(0.01)
        assert isinstance(await store.reserve(WHO, demand()), Hold)
        await store.aclose()
        await client.aclose()


async def test_a_connection_cancelled_before_it_is_made_does_not_go_to_the_next_caller(
    redis_url: str,
) -> None:
    for turns in range(40):  # one of them is between the socket and the handshake
        client = connect(redis_url)
        first = asyncio.create_task(client.ping())
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        assert await client.ping() is True, turns
        await client.aclose()


async def test_work_that_is_cancelled_or_late_is_ended() -> None:
    ended = 0

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            ended += 1

    with pytest.raises(asyncio.TimeoutError):
        await within_loop_time(work(), 0.01)
    assert ended == 1
    waiting = asyncio.create_task(within_loop_time(work(), 60))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == 2
