"""The store on a Redis that is frozen, flushed, restarted, refusing or half forbidden."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from conftest import PATIENT, eventually, tenant
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenancy.embedded_redis import EmbeddedRedis, _free_port, find_server
from tenancy.quota import Hold, QuotaRefusal, QuotaStore, QuotaUnavailable
from tenancy.redis import connect

pytestmark = pytest.mark.asyncio


class PlainServer:
    """A server that keeps nothing, always on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(find_server(self._folder)),
            "--port",
            str(self._port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[PlainServer]:
    server = PlainServer(tmp_path)
    yield server
    server.kill()


@pytest_asyncio.fixture
async def frozen_later(tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    """A server of its own (URL, pid), running again afterwards whatever the test did."""
    with EmbeddedRedis(tmp_path / "frozen") as server:
        client = connect(server.url + PATIENT)
        pid = int((await client.info("server"))["process_id"])
        await client.aclose()
        yield server.url, pid
        os.kill(pid, signal.SIGCONT)


async def ready(url: str) -> None:
    async def answers() -> bool:
        client = connect(url)
        try:
            return bool(await client.ping())
        except RedisError:
            return False
        finally:
            await client.aclose()

    await eventually(answers)


async def works(store: QuotaStore) -> bool:
    try:
        return isinstance(await store.reserve(tenant("probe", requests_per_minute=1_000_000), "r"), Hold)
    except QuotaUnavailable:
        return False


async def test_E06_a_frozen_server_costs_a_bound_and_gives_everything_back(
    frozen_later: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    url, pid = frozen_later
    client = connect(url + "?socket_timeout=0.3")  # a busy test machine must not look like an outage
    store = QuotaStore(client, probe_interval_s=0.1)
    who = tenant(requests_per_minute=500, requests_burst=100, max_concurrent_requests=5)
    caplog.set_level(logging.INFO, "tenancy")
    live = await store.reserve(who, "before")
    assert isinstance(live, Hold) and store.healthy

    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    calls = (store.reserve(who, f"r{i}") for i in range(3000))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, QuotaUnavailable) for answer in answers)
    assert not store.healthy
    for _ in range(1000):  # an open breaker asks nobody
        with pytest.raises(QuotaUnavailable):
            await store.reserve(who, "r")
    await store.settle(live)  # never raises, and is made good later
    assert time.monotonic() - started < 5, "one connect and one read timeout, not one per call"

    os.kill(pid, signal.SIGCONT)

    async def recovered() -> bool:
        return store.healthy and await works(store)

    await eventually(recovered)

    async def all_slots_free() -> bool:
        answer = await store.reserve(who, "after", slots=5)
        if isinstance(answer, Hold):
            await store.settle(answer)
        return isinstance(answer, Hold)

    # The server has run what its sockets held: that must be withdrawn long before the leases lapse.
    await eventually(all_slots_free)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("unavailable" in message for message in messages) == 1
    assert sum("available again" in message for message in messages) == 1
    await store.aclose()
    await client.aclose()


async def test_E06_refused_at_start_then_there(plain: PlainServer) -> None:
    client = connect(plain.url)
    store = QuotaStore(client, probe_interval_s=0.1)
    for _ in range(4):
        with pytest.raises(QuotaUnavailable):
            await store.reserve(tenant(requests_per_minute=5), "r")
    assert not store.healthy
    plain.start()

    async def healthy() -> bool:  # without any traffic
        return store.healthy

    await eventually(healthy)
    assert await works(store)
    await store.aclose()
    await client.aclose()


async def test_E08_script_flush_under_load_is_invisible(redis_url: str, redis: Redis) -> None:
    client = connect(redis_url + PATIENT)
    store = QuotaStore(client)
    who = tenant(requests_per_minute=1_000_000, max_concurrent_requests=1000)

    async def flush() -> None:
        for _ in range(100):
            await redis.script_flush()

    async def traffic() -> None:
        for _ in range(40):
            hold = await store.reserve(who, "r")
            assert isinstance(hold, Hold)
            await store.renew([hold])
            await store.settle(hold)

    await asyncio.gather(flush(), *(traffic() for _ in range(8)))
    hold = await store.reserve(who, "r", slots=1000)
    assert isinstance(hold, Hold), "every slot is back"
    await client.aclose()


async def test_E08_a_restart_with_nothing_kept_is_survived(plain: PlainServer) -> None:
    plain.start()
    await ready(plain.url)
    client = connect(plain.url + PATIENT)
    store = QuotaStore(client, probe_interval_s=0.1)
    who = tenant(max_concurrent_requests=2)
    live = [await store.reserve(who, "r") for _ in range(2)]
    plain.kill()
    plain.start()
    await ready(plain.url)
    # Counters begin anew; running requests are counted again from the next renewal on.
    assert isinstance(await store.reserve(who, "r"), Hold)
    assert await store.renew([hold for hold in live if isinstance(hold, Hold)]) == 2
    assert isinstance(await store.reserve(who, "r"), QuotaRefusal)
    await store.aclose()
    await client.aclose()


async def test_E07_without_the_script_command_limits_hold(redis_url: str, redis: Redis) -> None:
    await redis.acl_setuser(
        "noscript", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-script"], reset=True
    )
    await redis.script_flush()
    client = connect(
        redis_url.replace("redis://:", "redis://noscript:", 1).replace(_password(redis_url), "pw") + PATIENT
    )
    store = QuotaStore(client)
    who = tenant(max_concurrent_requests=3)
    answers = [await store.reserve(who, "r") for _ in range(6)]
    assert [isinstance(answer, Hold) for answer in answers] == [True] * 3 + [False] * 3
    await client.aclose()


async def test_E07_without_eval_nothing_is_let_through(redis_url: str, redis: Redis) -> None:
    await redis.acl_setuser(
        "noeval",
        enabled=True,
        passwords=["+pw"],
        keys=["*"],
        commands=["+@all", "-eval", "-evalsha"],
        reset=True,
    )
    client = connect(
        redis_url.replace("redis://:", "redis://noeval:", 1).replace(_password(redis_url), "pw") + PATIENT
    )
    store = QuotaStore(client, probe_interval_s=0.05)
    for _ in range(3):
        with pytest.raises(QuotaUnavailable) as error:
            await store.reserve(tenant(max_concurrent_requests=3), "r")
        assert "pw" not in str(error.value)
    assert not store.healthy
    await redis.acl_setuser("noeval", commands=["+eval", "+evalsha"])

    async def healthy() -> bool:
        return store.healthy

    await eventually(healthy)
    await store.aclose()
    await client.aclose()


def _password(url: str) -> str:
    return url.split(":", 2)[2].split("@")[0]
