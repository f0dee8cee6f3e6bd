"""The store on a Redis that is frozen, flushed, restarted, refusing or half forbidden."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from conftest import PATIENT, demand, eventually, take, tenant
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenancy import owed
from tenancy.embedded_redis import EmbeddedRedis, _free_port, find_server
from tenancy.ledger import LedgerFiles
from tenancy.models import Tenant
from tenancy.quota import Hold, QuotaRefusal, QuotaStore, QuotaUnavailable, Used
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
        return isinstance(await store.reserve(tenant("probe", requests_per_minute=1_000_000), demand()), Hold)
    except QuotaUnavailable:
        return False


async def test_e06_a_frozen_server_costs_a_bound_and_gives_everything_back(
    frozen_later: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    url, pid = frozen_later
    client = connect(url + "?socket_timeout=0.3")  # a busy test machine must not look like an outage
    store = QuotaStore(client, probe_interval_s=0.1)
    who = tenant(requests_per_minute=500, requests_burst=100, max_concurrent_requests=5)
    caplog.set_level(logging.INFO, "tenancy")
    live = await store.reserve(who, demand())
    assert isinstance(live, Hold) and store.healthy

    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    calls = (store.reserve(who, demand(request_id=f"r{i}")) for i in range(3000))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, QuotaUnavailable) for answer in answers)
    assert not store.healthy
    for _ in range(1000):  # an open breaker asks nobody
        with pytest.raises(QuotaUnavailable):
            await store.reserve(who, demand())
    await store.settle(live, Used(1))  # never raises, and is made good later
    assert time.monotonic() - started < 5, "one connect and one read timeout, not one per call"

    os.kill(pid, signal.SIGCONT)

    async def recovered() -> bool:
        return store.healthy and await works(store)

    await eventually(recovered)

    async def all_slots_free() -> bool:
        answer = await store.reserve(who, demand(slots=5))
        if isinstance(answer, Hold):
            await store.settle(answer, Used(1))
        return isinstance(answer, Hold)

    # The server has run what its sockets held: that must be withdrawn long before the leases lapse.
    await eventually(all_slots_free)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("unavailable" in message for message in messages) == 1
    assert sum("available again" in message for message in messages) == 1
    await store.aclose()
    await client.aclose()


async def test_e06_refused_at_start_then_there(plain: PlainServer) -> None:
    client = connect(plain.url)
    store = QuotaStore(client, probe_interval_s=0.1)
    for _ in range(4):
        with pytest.raises(QuotaUnavailable):
            await store.reserve(tenant(requests_per_minute=5), demand())
    assert not store.healthy
    plain.start()

    async def healthy() -> bool:  # without any traffic
        return store.healthy

    await eventually(healthy)
    assert await works(store)
    await store.aclose()
    await client.aclose()


async def test_e08_script_flush_under_load_is_invisible(redis_url: str, redis: Redis) -> None:
    client = connect(redis_url + PATIENT)
    store = QuotaStore(client)
    who = tenant(requests_per_minute=1_000_000, max_concurrent_requests=1000)

    async def flush() -> None:
        for _ in range(100):
            await redis.script_flush()

    async def traffic() -> None:
        for _ in range(40):
            hold = await store.reserve(who, demand())
            assert isinstance(hold, Hold)
            await store.renew([hold])
            await store.settle(hold, Used(1))

    await asyncio.gather(flush(), *(traffic() for _ in range(8)))
    hold = await store.reserve(who, demand(slots=1000))
    assert isinstance(hold, Hold), "every slot is back"
    await client.aclose()


async def test_e08_a_restart_with_nothing_kept_is_survived(plain: PlainServer) -> None:
    plain.start()
    await ready(plain.url)
    client = connect(plain.url + PATIENT)
    store = QuotaStore(client, probe_interval_s=0.1)
    who = tenant(max_concurrent_requests=2)
    live = [await store.reserve(who, demand()) for _ in range(2)]
    plain.kill()
    plain.start()
    await ready(plain.url)
    # Counters begin anew; running requests are counted again from the next renewal on.
    assert isinstance(await store.reserve(who, demand()), Hold)
    assert await store.renew([hold for hold in live if isinstance(hold, Hold)]) == 2
    assert isinstance(await store.reserve(who, demand()), QuotaRefusal)
    await store.aclose()
    await client.aclose()


async def test_e07_without_the_script_command_limits_hold(redis_url: str, redis: Redis) -> None:
    await redis.acl_setuser(
        "noscript", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-script"], reset=True
    )
    await redis.script_flush()
    client = connect(
        redis_url.replace("redis://:", "redis://noscript:", 1).replace(_password(redis_url), "pw") + PATIENT
    )
    store = QuotaStore(client)
    who = tenant(max_concurrent_requests=3)
    answers = [await store.reserve(who, demand()) for _ in range(6)]
    assert [isinstance(answer, Hold) for answer in answers] == [True] * 3 + [False] * 3
    await client.aclose()


async def test_e07_without_eval_nothing_is_let_through(redis_url: str, redis: Redis) -> None:
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
            await store.reserve(tenant(max_concurrent_requests=3), demand())
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


async def outage(urls: list[str]) -> list[QuotaStore]:
    """Gateways that have learnt of each other and then lose Redis."""
    stores = [QuotaStore(connect(url + PATIENT), probe_interval_s=30) for url in urls]
    for _ in range(2):
        for store in stores:
            await store._presence.beat()
    return stores


async def test_e07_each_limit_follows_its_own_policy_and_gateways_share_one_limit(
    plain: PlainServer,
) -> None:
    plain.start()
    await ready(plain.url)
    stores = await outage([plain.url] * 3)
    shared = tenant("shared", requests_per_minute=20, on_outage="local_share")
    slots = tenant("slots", max_concurrent_requests=7, on_outage="local_share")
    closed = tenant("closed", requests_per_minute=20)
    opened = tenant("open", requests_per_minute=2, tokens_per_day=5, on_outage="open")
    mixed = tenant(
        "mixed", requests_per_minute=30, tokens_per_day=5, on_outage={"requests_per_minute": "local_share"}
    )
    small = tenant("small", requests_per_minute=2, on_outage="local_share")
    before = await take(stores[0], slots)
    plain.kill()

    async def admitted(who: Tenant, tries: int) -> int:
        answers = [await store.reserve(who, demand(input_tokens=3)) for _ in range(tries) for store in stores]
        return sum(isinstance(answer, Hold) for answer in answers)

    assert await admitted(shared, 12) == 18, "6 on each of 3 gateways"
    assert await admitted(slots, 4) == 6
    assert await admitted(opened, 10) == 30
    refusal = await stores[0].reserve(shared, demand())
    assert isinstance(refusal, QuotaRefusal) and refusal.code == "rate_limit_exceeded"
    assert refusal.retry_after_ms is not None and 0 < refusal.retry_after_ms <= 60_000
    for who in (closed, mixed, small):  # a budget is closed by default; a third of 2 is nothing
        with pytest.raises(QuotaUnavailable):
            await stores[1].reserve(who, demand(input_tokens=3))
    assert stores[0].admitted_in_outages == 6 + 2 + 10
    assert [store.healthy for store in stores] == [False] * 3
    await stores[0].settle(before, Used(1))
    for store in stores:
        await store.aclose()


async def test_e07_a_gateway_that_never_learnt_of_the_others_takes_no_share(plain: PlainServer) -> None:
    store = QuotaStore(connect(plain.url))
    with pytest.raises(QuotaUnavailable):
        await store.reserve(tenant(requests_per_minute=20, on_outage="local_share"), demand())
    await store.aclose()


async def test_e07_what_was_admitted_in_an_outage_counts_after_it(plain: PlainServer) -> None:
    plain.start()
    await ready(plain.url)
    [store] = await outage([plain.url])
    store._redis._probe_interval_s = 0.05
    who = tenant(
        requests_per_minute=5, max_concurrent_requests=4, tokens_per_day=100,
        on_outage={"requests_per_minute": "local_share", "max_concurrent_requests": "local_share",
                   "tokens_per_day": "open"},
    )  # fmt: skip
    plain.kill()
    ended, live = [await take(store, who, input_tokens=9) for _ in range(2)]
    assert ended.local and live.local
    await store.settle(ended, Used(40))
    assert store.owed >= 1
    plain.start()

    async def settled() -> bool:
        return store.owed == 0 and store.healthy

    await eventually(settled)
    assert await store.renew([live]) == 1, "a running request takes its place in Redis"
    hold = await take(store, who, input_tokens=1)
    assert hold.requests is not None and hold.requests.remaining == 2
    assert isinstance(await store.reserve(who, demand(input_tokens=60)), QuotaRefusal)
    await store.settle(live, Used(50))
    assert isinstance(await store.reserve(who, demand(input_tokens=10)), QuotaRefusal)
    await store.aclose()


async def test_no_row_is_lost_of_usage_that_redis_never_confirmed(
    plain: PlainServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Redis certainly has not is sent for as long as it takes; what it may have goes to the ledger's file."""
    monkeypatch.setattr(owed, "SENT_AGAIN_FOR_S", 0.5)
    files = LedgerFiles(tmp_path / "ledger")
    plain.start()
    await ready(plain.url)
    client = connect(plain.url)
    store = QuotaStore(client, probe_interval_s=0.05, unconfirmed=files.write)
    who = tenant(tokens_per_day=1000, on_outage="open")
    holds = [await take(store, who, request_id=f"r{i}", input_tokens=1) for i in range(5)]
    plain.kill()
    for hold in holds[:4]:
        await store.settle(hold, Used(10))  # the first three open the breaker: they may have been made
    assert not store.healthy and store.owed == 4

    async def given_up() -> bool:
        return store.owed == 1

    await eventually(given_up)
    rows = list(files.read())
    assert [row["request"] for row in rows] == ["r0", "r1", "r2"]
    assert [row["input_tokens"] for row in rows] == [10] * 3
    plain.start()

    async def charged() -> bool:
        return store.owed == 0 and store.healthy

    await eventually(charged)
    [day] = await store.usage("alpha")
    assert (day.requests, day.input_tokens) == (1, 10)
    stream = await client.xrange("eh:v2:{alpha}:ledger")
    assert [json.loads(fields[b"row"])["request"] for _, fields in stream] == ["r3"]

    plain.kill()
    await store.settle(holds[4], Used(10))
    await store.aclose()  # the gateway stops meanwhile
    assert [row["request"] for row in files.read()] == ["r0", "r1", "r2", "r4"]
    await client.aclose()


async def test_gateways_that_end_are_counted_no_more(redis_url: str, redis: Redis) -> None:
    one, two = await outage([redis_url] * 2)
    assert (one._presence.count, two._presence.count) == (2, 2)
    two.start()
    await two.aclose()
    await one._presence.beat()
    assert one._presence.count == 1
    await one.aclose()


async def test_a_monthly_budget_survives_a_restart(tmp_path: Path) -> None:
    who = tenant(tokens_per_month=100, cost_per_month=1.0)
    for used, admitted in ((60, True), (30, True), (20, False)):
        with EmbeddedRedis(tmp_path) as server:
            client = connect(server.url + PATIENT)
            store = QuotaStore(client)
            answer = await store.reserve(who, demand(input_tokens=used))
            assert isinstance(answer, Hold) == admitted
            if isinstance(answer, Hold):
                await store.settle(answer, Used(used))
            await store.aclose()
            await client.aclose()
