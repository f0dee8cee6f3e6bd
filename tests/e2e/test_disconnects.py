"""Clients that leave, in every way and at every moment (cases of group B): nothing of theirs goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import random
import signal
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
import redis

pytestmark = pytest.mark.e2e

TEXT = "/v1/completions"
SLOTS = 32  # of the stub engine


def send(server: Any, tenant: str, request_id: str, **fields: Any) -> socket.socket:
    """A request on a socket of its own."""
    body = json.dumps({"model": "default", "prompt": "Hello", "max_tokens": 6000, **fields}).encode()
    head = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "X-Request-Id": request_id,
        **server.headers(tenant),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    connection = socket.socket()
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(f"POST {TEXT} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    return connection


def receive_until(connection: socket.socket, pattern: bytes) -> None:
    received = b""
    while pattern not in received:
        more = connection.recv(65536)
        assert more, received
        received += more


def leave(connection: socket.socket, how: str) -> None:
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def outcome(server: Any, request_id: str) -> str | None:
    lines = [line for line in server.access_log() if line["request"] == request_id]
    return lines[0]["outcome"] if lines else None


def at_rest(server: Any, *tenants: str) -> bool:
    return server.is_idle() and all(server.slots(tenant) == 0 for tenant in tenants or ("alpha", "beta"))


def tasks(server: Any) -> list[float]:
    """Of the event loops of gateway and engine."""
    return [server.metric("gateway_asyncio_tasks"), server.metric("engine_asyncio_tasks")]


def nothing_goes_on(server: Any, idle: list[float]) -> bool:
    """No request is known to anybody, and no task is left beside those of the idle server."""
    return (
        at_rest(server)
        and server.metric("gateway_live_requests") == server.metric("engine_live_requests") == 0
        and all(now <= before for now, before in zip(tasks(server), idle, strict=True))
    )


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [False, True])
def test_B01_leaving_ends_the_work(stub: Any, how: str, stream: bool) -> None:
    for phase, prompt in (("prefill", "x" * 2000), ("decode", "x")):
        name = f"B01-{how}-{stream}-{phase}"
        connection = send(stub, "beta", name, prompt=prompt, stream=stream)
        if phase == "prefill":
            stub.wait_until(lambda: stub.metric("num_requests_running") == 1, 5)
        elif stream:
            receive_until(connection, b"data:")
        else:
            time.sleep(0.3)
        leave(connection, how)
        stub.wait_until(lambda: at_rest(stub), 5)
        stub.wait_until(lambda n=name: outcome(stub, n) is not None, 5)
        assert outcome(stub, name) == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
def test_B01_leaving_the_queue(stub: Any, stream: bool) -> None:
    running = [send(stub, "alpha", "B01-running", stream=True) for _ in range(SLOTS)]
    for connection in running:
        assert b"HTTP/1.1 200" in connection.recv(65536)
    waiting = [send(stub, "beta", f"B01-queue-{stream}-{how}", stream=stream) for how in ("close", "reset")]
    stub.wait_until(lambda: stub.slots("beta") == 2, 5)
    for connection, how in zip(waiting, ("close", "reset"), strict=True):
        leave(connection, how)
    stub.wait_until(lambda: stub.slots("beta") == 0, 5)
    for connection in running:
        connection.close()
    stub.wait_until(lambda: at_rest(stub), 10)
    assert {outcome(stub, f"B01-queue-{stream}-{how}") for how in ("close", "reset")} == {"cancelled"}


def drop_many(server: Any, count: int, within: float, seed: int) -> None:
    """Open so many requests, each closed after a random time."""
    moments = random.Random(seed)

    async def drop(client: httpx.AsyncClient) -> None:
        fields = {"prompt": "x" * moments.randrange(1, 3000), "stream": moments.random() < 0.7}
        request = {"model": "default", "max_tokens": 4000, **fields}
        asked = asyncio.create_task(client.post(TEXT, json=request, headers=server.headers("beta")))
        await asyncio.sleep(moments.uniform(0, within))
        asked.cancel()
        await asyncio.wait({asked})

    async def drop_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(drop(client) for _ in range(count)))

    asyncio.run(drop_all())


def full_concurrency(server: Any) -> None:
    """As many as there are slots run together."""
    with server.http("beta") as client:
        request = {"model": "default", "prompt": ["x"] * SLOTS, "max_tokens": 60}
        answer = client.post(TEXT, json=request)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == SLOTS * 60


@pytest.mark.parametrize(
    ("count", "rounds"), [(60, 2), pytest.param(500, 5, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_B02_dropped_within_milliseconds(stub: Any, count: int, rounds: int) -> None:
    idle = tasks(stub)
    for number in range(rounds):
        drop_many(stub, count, 0.05, number)
        stub.wait_until(lambda: nothing_goes_on(stub, idle), 15)
    full_concurrency(stub)


@pytest.mark.slow
def test_B02_a_thousand_streams_dropped_at_random_moments(stub: Any) -> None:
    """Zero pages, slots, holds and tasks are left."""
    idle = tasks(stub)
    for number in range(10):
        drop_many(stub, 100, 3.0, 100 + number)
    stub.wait_until(lambda: nothing_goes_on(stub, idle), 20)
    free, total = (stub.metric(f"kv_cache_page_{name}_pages") for name in ("free", "total"))
    evictable = stub.metric("kv_cache_page_evictable_pages")
    assert free + evictable == total
    full_concurrency(stub)


@pytest.mark.parametrize("last", [b'"finish_reason":"length"', b'"usage":{', b"data: [DONE]"])
def test_B09_leaving_after_the_last_chunk_is_no_cancellation(stub: Any, last: bytes) -> None:
    cancelled = stub.metric("requests_cancelled_total", tenant="beta")
    names = [f"B09-{uuid.uuid4().hex}" for _ in range(5)]
    for name in names:
        options = {"stream_options": {"include_usage": True}, "stream": True}
        connection = send(stub, "beta", name, max_tokens=5, **options)
        receive_until(connection, last)
        connection.close()
    for name in names:
        stub.wait_until(lambda n=name: outcome(stub, n) is not None, 5)
        assert outcome(stub, name) == "ok"
    assert stub.metric("requests_cancelled_total", tenant="beta") == cancelled
    [line] = [line for line in stub.access_log() if line["request"] == names[0]]
    assert line["output_tokens"] == 5


@pytest.fixture
def store(stub: Any) -> Iterator[redis.Redis]:
    settings = stub.redis_settings()
    with redis.Redis(port=int(settings["port"]), password=settings["requirepass"]) as client:
        yield client


def test_B12_a_slow_store_gets_every_slot_back(stub: Any, store: redis.Redis) -> None:
    """Redis stands still just as streams end and their clients leave: the release is made up for."""
    for number in range(5):
        connections = [send(stub, "beta", f"B12-{number}", max_tokens=8, stream=True) for _ in range(4)]
        for connection in connections:
            receive_until(connection, b"data:")
        store.client_pause(300)
        for connection in connections:
            connection.close()
        time.sleep(0.4)
        stub.wait_until(lambda: stub.health() == 200, 10)
    stub.wait_until(lambda: at_rest(stub), 15)


def test_B12_every_key_in_the_store_ends_by_itself(stub: Any, store: redis.Redis) -> None:
    with stub.http("narrow") as client:
        headers = {"Idempotency-Key": "B12"}
        client.post(TEXT, json={"model": "default", "prompt": "x", "max_tokens": 1}, headers=headers)
    # The directory of tenants stays, and rows of the ledger until they are in a file.
    owned = (b":ledger", b"eh:layout")
    keys = [k for k in store.scan_iter() if b"{+directory}" not in k and not k.endswith(owned)]
    assert keys
    assert [key for key in keys if store.pttl(key) == -1] == []


@pytest.fixture(scope="module")
def mortal(start_server: Any) -> Iterator[Any]:
    """A server of this file's own, whose parts die."""
    with start_server("--engine", "stub") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("how", ["engine frozen", "engine killed", "gateway killed"])
def test_B05_slots_come_back_from_what_froze_or_died(mortal: Any, how: str) -> None:
    """At most 30 s after the end of a gateway, and with everything else as soon as the request has ended.

    The streams of an engine end with one event that says so. Those of a gateway are cut: nobody is left to say it.
    """
    in_flight = [send(mortal, "narrow", f"B05-{how}-{n}", stream=True) for n in range(2)]
    for connection in in_flight:
        receive_until(connection, b"data:")
    assert mortal.slots("narrow") == 2
    title = "ray::ServeReplica:evenhand:Gateway" if how == "gateway killed" else "ray::EngineActor"
    process = mortal.find_process(title)
    process.send_signal(signal.SIGSTOP if how == "engine frozen" else signal.SIGKILL)
    for connection in in_flight:
        end = b""
        while not end.endswith(b"\r\n0\r\n\r\n") and (more := connection.recv(65536)):
            end += more
        connection.close()
        *_, last = end.split(b"data: ")
        assert b"[DONE]" not in end
        if how == "gateway killed":
            assert not end.endswith(b"\r\n0\r\n\r\n"), "whoever reads it sees that it is not whole"
        else:
            error = json.loads(last.split(b"\n\n")[0])["error"]
            assert error["code"] == "engine_unavailable" and end.endswith(b"\r\n0\r\n\r\n")
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)
    mortal.wait_until(lambda: mortal.health() == 200, 60)
    mortal.wait_until(lambda: mortal.slots("narrow") == 0, 35)
    with mortal.http("narrow") as client:
        answer = client.post(TEXT, json={"model": "default", "prompt": ["a", "b"], "max_tokens": 2})
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_B05_a_client_sees_that_its_gateway_died(mortal: Any) -> None:
    """openai-python raises in a stream, and asks again by itself for a whole answer."""
    request = {"model": "default", "prompt": "x"}
    with mortal.openai() as client, mortal.openai(max_retries=3) as patient:
        stream = client.completions.create(**request, max_tokens=6000, stream=True)
        next(iter(stream))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            whole = pool.submit(patient.completions.create, **request, max_tokens=300)
            mortal.wait_until(lambda: mortal.metric("num_requests_running") == 2, 10)
            mortal.find_process("ray::ServeReplica:evenhand:Gateway").kill()
            with pytest.raises(openai.APIConnectionError):
                for _ in stream:
                    pass
            assert whole.result().usage.completion_tokens == 300
