"""Redis as users run it: TLS, ACL users, Sentinel, Cluster, each on real servers."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from conftest import demand, eventually, take, tenant, usage
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenancy.directory import TenantDirectory
from tenancy.directory_store import Change, DirectoryStore, DirectoryWatch
from tenancy.embedded_redis import _ENVIRONMENT, _free_port, find_server
from tenancy.ledger import LedgerFiles
from tenancy.ledger_writer import LedgerWriter
from tenancy.models import Tenant
from tenancy.quota import Hold, QuotaRefusal, QuotaStore, Used
from tenancy.redis import check_url, connect

pytestmark = pytest.mark.asyncio
PATIENT = "socket_timeout=10&socket_connect_timeout=10"
LIMITS = {"requests_per_minute": 3, "max_concurrent_requests": 5, "tokens_per_day": 1000}


class Servers:
    """Plain redis-servers in folders of their own, killed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, config: str | None = None) -> tuple[int, subprocess.Popen[bytes]]:
        port = _free_port()
        home = self._folder / str(port)
        home.mkdir()
        command = [str(find_server(self._folder))]
        if config is not None:
            (home / "redis.conf").write_text(config)
            command += [str(home / "redis.conf")]
        command += ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), *options]
        if "--sentinel" not in options:
            command += ["--save", "", "--appendonly", "no"]
        process = subprocess.Popen(
            command, env={**_ENVIRONMENT}, stdout=(home / "log").open("wb"), stdin=subprocess.DEVNULL
        )
        self._running.append(process)
        client = redis_py.Redis(port=port)
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except redis_py.AuthenticationError:
                break
            except redis_py.RedisError:
                assert process.poll() is None and time.monotonic() < deadline, (home / "log").read_text()
                time.sleep(0.02)
        client.close()
        return port, process

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.stop()


async def works_whole(client: Redis, blocking: Redis, folder: Path) -> None:
    """Every part that uses Redis, once."""
    store = QuotaStore(client)
    await store._presence.beat()
    assert store._presence.count == 1
    who = tenant(**LIMITS)
    holds = [await take(store, who, input_tokens=5) for _ in range(3)]
    assert isinstance(await store.reserve(who, demand()), QuotaRefusal)
    assert await store.renew(holds) == 0
    await store.void(holds[0])
    for hold in holds[1:]:
        await store.settle(hold, Used(5, 0, 2))
    assert [day.output_tokens for day in await store.usage("alpha")] == [4]
    writer = LedgerWriter(client, store, LedgerFiles(folder))
    assert await writer.round() == 2

    directories = DirectoryStore(client, store.guarded)
    directory = TenantDirectory([], b"s" * 32)
    directory.complete = False
    watch = DirectoryWatch(DirectoryStore(blocking, store.guarded), directory)

    async def complete() -> bool:
        return directory.complete

    await eventually(complete)
    await directories.apply("ops", [Change("create", None, Tenant(id="new"))])

    async def follows() -> bool:
        return directory.get("new") is not None

    await eventually(follows)
    assert [entry.who for entry in await directories.audit()] == ["ops"]
    await watch.aclose()
    await store.aclose()


async def test_an_acl_user_with_few_rights(servers: Servers, tmp_path: Path) -> None:
    """The rights that the operator's page names are enough."""
    rights = "~eh:* &* +@read +@write +@scripting +@connection +time"
    port, _ = servers.start(config=f"user default off\nuser evenhand on >pa:ss@word {rights}\n")
    url = f"redis://evenhand:pa%3Ass%40word@127.0.0.1:{port}/0?{PATIENT}"
    client, blocking = connect(url), connect(url)
    await works_whole(client, blocking, tmp_path / "ledger")
    await client.aclose()
    await blocking.aclose()


async def test_tls_is_spoken_and_checked(servers: Servers, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    port, _ = servers.start()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            sink.close()

        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    tls_port = proxy.sockets[0].getsockname()[1]
    url = f"rediss://127.0.0.1:{tls_port}/0?{PATIENT}"
    client, blocking = (connect(f"{url}&ssl_ca_certs={certificate}") for _ in range(2))
    await works_whole(client, blocking, tmp_path / "ledger")
    stranger = connect(url)
    with pytest.raises(RedisError, match="certificate verify failed"):
        await stranger.ping()
    for each in (client, blocking, stranger):
        await each.aclose()
    proxy.close()


async def test_e08_sentinel_and_a_failover(servers: Servers, tmp_path: Path) -> None:
    first, process = servers.start("--repl-diskless-sync-delay", "0")
    second, _ = servers.start("--replicaof", f"127.0.0.1 {first}", "--repl-diskless-sync-delay", "0")
    monitor = (
        f"sentinel monitor main 127.0.0.1 {first} 1\n"
        "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
    )
    sentinel, _ = servers.start("--sentinel", config=monitor)
    replica = redis_py.Redis(port=second)

    async def replicated() -> bool:
        found = redis_py.Redis(port=sentinel).execute_command("SENTINEL", "replicas", "main")
        return bool(found) and replica.info("replication")["master_link_status"] == "up"

    await eventually(replicated, 30)
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/main/0?{PATIENT}"
    client, blocking = connect(url), connect(url)
    await works_whole(client, blocking, tmp_path / "ledger")
    store = QuotaStore(client, probe_interval_s=0.1)
    who = tenant("kept", tokens_per_day=100)
    await store.settle(await take(store, who, input_tokens=90), Used(90))
    await client.wait(1, 5000)
    process.kill()

    async def refused_by_the_new_master() -> bool:
        try:
            answer = await store.reserve(who, demand(input_tokens=20))
        except Exception:
            return False
        assert isinstance(answer, QuotaRefusal), "what was used is not forgotten"
        return True

    await eventually(refused_by_the_new_master, 40)
    assert replica.role()[0] == b"master"
    for each in (store, client, blocking):
        await each.aclose()


async def test_a_cluster(servers: Servers, tmp_path: Path) -> None:
    buses = [_free_port() for _ in range(3)]
    ports = [servers.start("--cluster-enabled", "yes", "--cluster-port", str(bus))[0] for bus in buses]
    nodes = [redis_py.Redis(port=port) for port in ports]
    slots = [(0, 5460), (5461, 10922), (10923, 16383)]
    for node, (low, high) in zip(nodes, slots, strict=True):
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
        node.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0], buses[0])

    async def formed() -> bool:
        return all(_ok(node) for node in nodes)

    await eventually(formed, 30)
    url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{ports[1]}?{PATIENT}"
    client, blocking = connect(url), connect(url)
    await works_whole(client, blocking, tmp_path / "ledger")
    store = QuotaStore(client)
    many = [tenant(f"t{i}", **LIMITS) for i in range(30)]
    answers = await asyncio.gather(*(store.reserve(who, demand()) for who in many))
    holds = [answer for answer in answers if isinstance(answer, Hold)]
    assert len(holds) == 30 and await store.renew(holds) == 0
    for hold in holds:
        await store.settle(hold, Used(1))
    assert all(node.dbsize() > 10 for node in nodes), "tenants are spread over the nodes"
    writer = LedgerWriter(client, QuotaStore(client), LedgerFiles(tmp_path / "other"))
    await client.delete("eh:v2:{+ledger}:writer")
    assert await writer.round() == 30, "the sweep finds streams on every node"
    assert await usage(client, "t7") == {"requests": 1, "input": 1}
    for each in (store, client, blocking):
        await each.aclose()


def _ok(node: Any) -> bool:
    info = node.cluster("INFO")
    return bool(info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == 3)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host", "allowed: redis://"),
        ("redis+sentinel://h1:1,h2:2", "name of the service"),
        ("redis+sentinel://h1:1,h2:2/main/x", "name of the service"),
        ("redis+sentinel://h1:x/main", "HOST:PORT"),
        ("redis+cluster://h1:1,/", "HOST:PORT"),
        ("redis+cluster://h1:1/3", "database 0 alone"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:p@h:1/3", "unix:///run/redis.sock?db=1", "rediss://h/0?ssl_cert_reqs=none",
        "redis+sentinel://u:p@h1,[::1]:2/main", "rediss+cluster://h1:1,h2",
    ],
)  # fmt: skip
async def test_what_is_supported_passes(url: str) -> None:
    check_url(url)
    await connect(url).aclose()
