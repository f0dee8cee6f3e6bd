"""A gateway's pool tells the fair queue of output lengths and learns from it, through the queue's deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import ray
from test_fair_queue_actor import SPEC

from policies.output_length import DEFAULT_OUTPUT_LENGTH
from serve_app import pool as pool_module
from serve_app.fair_queue import FairQueueActor, QueueSnapshot
from serve_app.pool import ModelPool
from serve_app.text.model_text import stub_model_text


class Handle:
    """An actor handle of the queue: the real actor's code, called in this process."""

    def __init__(self) -> None:
        self.actor = FairQueueActor(SPEC)
        self.dead = False

    @property
    def snapshot(self) -> Any:
        return self

    async def remote(self, *arguments: Any) -> QueueSnapshot:
        if self.dead:
            raise ray.exceptions.ActorUnavailableError("no queue", None)
        return await self.actor.snapshot(*arguments)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("not true after 10 s")


async def test_lengths_reach_the_other_gateway_though_the_queue_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = Handle()
    monkeypatch.setattr(pool_module, "_WATCH_SECONDS", 0.005)
    monkeypatch.setattr(pool_module, "find_actor", lambda name: handle)
    here, there = (ModelPool("m", (), stub_model_text(1000), "queue", (), name) for name in ("g0", "g1"))
    try:
        handle.dead = True
        await until(lambda: here.queue_snapshot is None)
        for _ in range(20):
            here.output_lengths.observe("a", 300)
        await asyncio.sleep(0.02)  # some calls fail meanwhile
        assert there.output_lengths.of("a") == DEFAULT_OUTPUT_LENGTH
        handle.dead = False
        await until(lambda: there.output_lengths.of("a") != DEFAULT_OUTPUT_LENGTH)
        assert there.output_lengths.of("a").longest == 300
        assert handle.actor._queue.output_lengths.of("a") == there.output_lengths.of("a")
    finally:
        here.stop()
        there.stop()
