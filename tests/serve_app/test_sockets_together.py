"""A gateway's pool, a fair queue and a stub engine on their real sockets, with actor calls made directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
import ray
from actor_handle import Handle
from test_fair_queue_actor import SPEC

from engine_actor.actor import EngineActor, EngineSpec
from engine_actor.build import EngineOptions
from engine_actor.request import EngineRequest, SamplingParams, StreamRow
from policies.tickets import Grant, Ticket
from serve_app import channel, fair_queue, queue_client
from serve_app.channel import EngineLostError, GrantVoidError, Mailbox
from serve_app.fair_queue import FairQueueActor
from serve_app.pool import ModelPool, QueueGoneError
from serve_app.text.model_text import stub_model_text

pytestmark = pytest.mark.timeout(60)


class System:
    """One engine, one fair queue, and the pool of one gateway."""

    def __init__(self) -> None:
        options = EngineOptions(source="", engine="stub", kv_pages=640)
        self.handles = {
            "e0": Handle(EngineActor(EngineSpec("e0", "m", options))),
            "queue": Handle(FairQueueActor(SPEC)),
        }

    @property
    def engine(self) -> EngineActor:
        engine: EngineActor = self.handles["e0"].actor
        return engine

    @property
    def queue(self) -> FairQueueActor:
        queue: FairQueueActor = self.handles["queue"].actor
        return queue

    def connect(self) -> ModelPool:
        return ModelPool("m", (), stub_model_text(4096), "queue", ("e0",), "g")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("not true after 10 s")


@pytest.fixture
async def system(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    system = System()
    for module in (channel, fair_queue, queue_client):
        monkeypatch.setattr(module, "find_actor", system.handles.get)
        monkeypatch.setattr(module, "_RECONNECT_SECONDS", 0.01)
    while (await system.engine.renew("owner")).state != "ready":
        await asyncio.sleep(0.01)
    await system.queue.renew("owner")
    yield system
    for task in system.queue._tasks:
        task.cancel()
    assert system.engine._engine_loop is not None
    system.engine._engine_loop.stop()


@pytest.fixture
async def pool(system: System) -> AsyncIterator[ModelPool]:
    pool = system.connect()
    await until(lambda: pool.ready and bool(system.queue._engines))
    yield pool
    pool.stop()


async def enter(pool: ModelPool, name: str, **fields: int) -> Grant:
    ticket = Ticket(name, 1, "a", 1.0, 20, 5, **fields)
    grant = await pool.ask_for_entry(ticket, time.monotonic(), 10.0)
    assert isinstance(grant, Grant) and (grant.request, grant.engine) == (name, "e0")
    return grant


async def submit(pool: ModelPool, grant: Grant, max_tokens: int = 5, **changes: int) -> Mailbox:
    request = EngineRequest(
        f"{grant.request}/0",
        grant.attempt,
        grant.request,
        "a",
        list(range(20)),
        SamplingParams(max_tokens),
        queue_epoch=changes.get("queue_epoch", grant.queue_epoch),
    )
    epoch = changes.get("engine_epoch", grant.engine_epoch)
    return await pool.channels["e0"].submit([request], grant.attempt, epoch)


async def answer(mailbox: Mailbox) -> list[int]:
    tokens: list[int] = []
    while True:
        delivery = await mailbox.get(10.0)
        assert delivery is not None
        for row in delivery.rows:
            tokens += row.token_ids
            if row.finish_reason is not None:
                return tokens


async def test_many_requests_at_once_get_each_its_answer_and_all_are_counted(
    system: System, pool: ModelPool
) -> None:
    async def one(number: int) -> list[int]:
        return await answer(await submit(pool, await enter(pool, f"r{number}")))

    answers = await asyncio.gather(*map(one, range(60)))
    assert answers == [answers[0]] * 60 and len(answers[0]) == 5
    await until(lambda: system.queue._queue.snapshot()["a"].booked == 0)
    account = system.queue._queue.snapshot()["a"]
    cached = system.engine._scheduler.service.cached_tokens  # type: ignore[union-attr]
    assert account.served >= 60 * 2 * 5 and (account.queued, cached % 16) == (0, 0)
    assert await system.engine.is_idle() and not system.queue._asking


async def test_grants_of_others_times_are_void(system: System, pool: ModelPool) -> None:
    grant = await enter(pool, "r")
    with pytest.raises(GrantVoidError, match="older"):
        await submit(pool, grant, queue_epoch=grant.queue_epoch - 1)
    with pytest.raises(GrantVoidError, match="not connected"):
        await submit(pool, grant, engine_epoch=grant.engine_epoch - 1)
    assert len(await answer(await submit(pool, grant))) == 5


async def test_B05_a_broken_channel_loses_what_ran_and_comes_back(system: System, pool: ModelPool) -> None:
    cut = await submit(pool, await enter(pool, "cut"), 2000)
    assert await cut.get(10.0) is not None
    for gateway in list(system.engine._gateways._connected):
        gateway.connection.close()
    with pytest.raises(EngineLostError):
        await answer(cut)
    await until(lambda: system.engine._gateways.live_requests == 0)
    await until(lambda: pool.channels["e0"].description is not None)
    assert len(await answer(await submit(pool, await enter(pool, "again")))) == 5


async def test_B05_an_engine_that_does_not_answer_is_given_up(
    system: System, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_SUBMIT_TIMEOUT_SECONDS", 0.05)
    grant = await enter(pool, "r")
    monkeypatch.setattr(system.engine._gateways, "_hear", lambda gateway, data: None)
    with pytest.raises(EngineLostError, match="did not answer"):
        await submit(pool, grant)
    assert not pool.channels["e0"]._mailboxes and not pool.channels["e0"]._answers


async def test_B05_tickets_keep_their_place_through_a_lost_queue_and_one_that_leaves_is_gone(
    system: System, pool: ModelPool
) -> None:
    slots = [await submit(pool, await enter(pool, f"slot{n}"), 300) for n in range(32)]
    waiting = [asyncio.create_task(enter(pool, f"w{n}")) for n in range(3)]
    await until(lambda: len(system.queue._asking) == 3)
    waiting[2].cancel()
    pool.queue.withdraw(Ticket("w2", 1, "a", 1.0, 20, 5))
    await until(lambda: len(system.queue._asking) == 2)
    system.handles["queue"].dead = True
    for gateway in list(system.queue._gateways):
        gateway.connection.close()
    await until(lambda: not system.queue._asking and len(system.queue._queue) == 0)
    system.handles["queue"].dead = False
    for mailbox in slots:
        await answer(mailbox)
    for grant in await asyncio.gather(*waiting[:2]):
        assert grant.queued_ms > 0
        await answer(await submit(pool, grant))


async def test_B05_a_silent_gateway_or_queue_is_cut_off(
    system: System, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_client, "TELL_SECONDS", 0.01)
    [gateway] = system.queue._gateways
    monkeypatch.setattr(fair_queue, "GATEWAY_LEASE_SECONDS", -1.0)
    await until(lambda: gateway.connection.closed)
    monkeypatch.setattr(fair_queue, "GATEWAY_LEASE_SECONDS", 60.0)
    await until(lambda: pool.queue.snapshot is not None)
    [gateway] = system.queue._gateways
    monkeypatch.setattr(queue_client, "_SILENT_SECONDS", 0.2)
    gateway.connection.on_message = lambda data: None
    await until(lambda: gateway.connection.closed)
    await until(lambda: pool.queue.snapshot is not None)


async def test_nobody_to_ask_is_told_in_time(system: System, pool: ModelPool) -> None:
    system.handles["queue"].dead = True
    for gateway in list(system.queue._gateways):
        gateway.connection.close()
    with pytest.raises(QueueGoneError):
        await pool.ask_for_entry(Ticket("r", 1, "a", 1.0, 20, 5), time.monotonic(), 0.3)
    assert not pool.ready


async def test_a_newer_fair_queue_takes_over(system: System, pool: ModelPool) -> None:
    old = await enter(pool, "old")
    successor = FairQueueActor(SPEC)
    await successor.renew("owner")
    await until(lambda: bool(successor._engines))
    assert successor._queue.queue_epoch > system.queue._queue.queue_epoch
    with pytest.raises(GrantVoidError):
        await submit(pool, old)
    for task in successor._tasks:
        task.cancel()


async def test_deliveries_of_a_step_leave_turns_to_others(pool: ModelPool) -> None:
    lane = pool.channels["e0"]
    boxes = [Mailbox([(str(number), 1)], 1) for number in range(64)]
    lane._mailboxes = {box.keys[0]: box for box in boxes}
    got: list[int] = []
    for _ in range(2):
        asyncio.get_running_loop().call_soon(lambda: got.append(sum(len(box._items) for box in boxes)))
        lane._deliver(tuple([StreamRow(str(number), 1, (1,)) for number in range(64)]), 0)
    await until(lambda: not lane._undelivered)
    assert [len(box._items) for box in boxes] == [2] * 64
    assert got[0] == got[1] and 64 < got[0] < 128, "first tokens at once, the others in turns"
    lane._mailboxes = {}


async def test_an_error_that_nobody_expected_does_not_end_a_connection_for_ever(
    system: System, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {name: 1 for name in system.handles}

    def find(name: str) -> object:
        faults[name] -= 1
        if faults[name] >= 0:
            raise TypeError("nobody expected this")
        return system.handles[name]

    for module in (channel, fair_queue, queue_client):
        monkeypatch.setattr(module, "find_actor", find)
    faults["e0"] = 2  # the gateway's and the queue's
    for end in (*system.engine._gateways._connected, *system.queue._gateways):
        end.connection.close()
    await until(lambda: not pool.ready)
    system.engine._report_queue.put_nowait(None)  # type: ignore[union-attr]
    await until(lambda: max(faults.values()) < 0)
    await until(lambda: pool.ready and bool(system.queue._engines))
    assert len(await answer(await submit(pool, await enter(pool, "r")))) == 5
