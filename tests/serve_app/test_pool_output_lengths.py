"""A gateway's pool tells the fair queue of output lengths and learns from it, through the queue's deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import ray
from actor_handle import Handle
from test_fair_queue_actor import SPEC

from policies.output_length import DEFAULT_OUTPUT_LENGTH
from serve_app import queue_client
from serve_app.fair_queue import FairQueueActor
from serve_app.pool import ModelPool
from serve_app.text.model_text import stub_model_text


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("not true after 10 s")


async def test_lengths_reach_the_other_gateway_though_the_queue_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = FairQueueActor(SPEC)
    handle = Handle(actor)
    monkeypatch.setattr(queue_client, "TELL_SECONDS", 0.005)
    monkeypatch.setattr(queue_client, "_RECONNECT_SECONDS", 0.005)
    monkeypatch.setattr(queue_client, "find_actor", lambda name: handle)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    here, there = (ModelPool("m", (), stub_model_text(1000), "queue", (), name) for name in ("g0", "g1"))
    try:
        await until(lambda: here.queue.snapshot is not None and there.queue.snapshot is not None)
        handle.dead = True
        for gateway in list(actor._gateways):
            gateway.connection.close()
        await until(lambda: here.queue.snapshot is None)
        for _ in range(20):
            here.output_lengths.observe("a", 300)
        await asyncio.sleep(0.02)  # some attempts fail meanwhile
        assert there.output_lengths.of("a") == DEFAULT_OUTPUT_LENGTH
        handle.dead = False
        await until(lambda: there.output_lengths.of("a") != DEFAULT_OUTPUT_LENGTH)
        assert there.output_lengths.of("a").longest == 300
        assert actor._queue.output_lengths.of("a") == there.output_lengths.of("a")
    finally:
        here.stop()
        there.stop()
