"""Mailboxes and time limits: rows and cancellations that come in the same turn of the loop are both kept."""

from __future__ import annotations

import asyncio

import pytest

from engine_actor.request import StreamRow
from serve_app.channel import Delivery, EngineChannel, EngineLostError, Mailbox
from serve_app.within import within


def delivery(token: int) -> Delivery:
    return Delivery((StreamRow("r", 1, (token,)),), 0)


async def test_rows_come_in_order_and_a_loss_after_them() -> None:
    mailbox = Mailbox([("r", 1)], 1)
    mailbox.put(delivery(1))
    mailbox.put(delivery(2))
    mailbox.put(EngineLostError("gone"))
    assert [(await mailbox.get(1.0)), (await mailbox.get(1.0))] == [delivery(1), delivery(2)]
    with pytest.raises(EngineLostError):
        await mailbox.get(1.0)


async def test_a_silent_engine_gives_none() -> None:
    assert await Mailbox([("r", 1)], 1).get(0.01) is None


async def test_a_wait_has_its_own_end_whatever_waits_came_before() -> None:
    """One timer serves them all."""
    loop = asyncio.get_running_loop()
    mailbox = Mailbox([("r", 1)], 1)
    mailbox.put(delivery(1))
    assert await mailbox.get(10.0) == delivery(1)
    loop.call_later(0.02, mailbox.put, delivery(2))
    assert await mailbox.get(10.0) == delivery(2)  # leaves a timer far ahead
    begin = loop.time()
    assert await mailbox.get(0.05) is None
    loop.call_later(0.02, mailbox.put, delivery(3))
    assert await mailbox.get(0.1) == delivery(3)  # leaves one that goes off too early
    assert loop.time() - begin < 5.0
    begin = loop.time()
    assert await mailbox.get(0.15) is None
    assert loop.time() - begin > 0.14
    mailbox.close()


async def test_first_tokens_are_delivered_before_the_next_ones_of_others() -> None:
    channel = EngineChannel("engine", "gateway")
    channel.stop()
    woken: list[str] = []

    async def read(mailbox: Mailbox) -> None:
        while (got := await mailbox.get(5.0)) is not None and got.rows[-1].finish_reason is None:
            woken.append("".join(row.request for row in got.rows))

    boxes = {name: Mailbox([(name, 1)], 1) for name in "abc"}
    channel._mailboxes = {(name, 1): box for name, box in boxes.items()}
    readers = [asyncio.create_task(read(box)) for box in boxes.values()]
    await asyncio.sleep(0)
    for names in ("ab", "abcc", "abc"):
        channel._deliver(tuple(StreamRow(name, 1, (1,)) for name in names), 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert woken == ["a", "b", "cc", "a", "b", "a", "b", "c"]
    channel._deliver(tuple(StreamRow(name, 1, (1,), "stop") for name in boxes), 0)
    await asyncio.gather(*readers)


async def test_B02_a_cancelled_reader_ends_and_leaves_the_rows() -> None:
    mailbox = Mailbox([("r", 1)], 1)
    reader = asyncio.create_task(mailbox.get(10.0))
    await asyncio.sleep(0)
    mailbox.put(delivery(1))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await mailbox.get(1.0) == delivery(1)


async def test_B02_within_keeps_a_cancellation_that_comes_with_the_result() -> None:
    result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(within(10.0, result))
    await asyncio.sleep(0)
    result.set_result(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_within_gives_result_error_or_timeout() -> None:
    async def fail() -> None:
        raise KeyError("x")

    assert await within(1.0, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(KeyError):
        await within(1.0, fail())
    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, asyncio.Event().wait())
