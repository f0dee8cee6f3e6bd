"""A fair queue's counters go to Redis and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from policies.output_length import OutputLength
from policies.service_accounts import CountedService, QueueState, TenantState
from serve_app import queue_state
from serve_app.queue_state import QueueStateKeeper
from tenancy.redis import EmbeddedRedis

STATE = QueueState(
    queue_epoch=4,
    tenants={"alpha": TenantState(2.0, 1234.5, 617.25, True), "beta": TenantState(1.0, 0.0, 617.25, False)},
    engines={"engine/0": CountedService(17, 99, {"alpha": 1234.5})},
    last_to_leave="beta",
    output_lengths={"alpha": OutputLength(81.5, 200)},
)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(str(tmp_path / "redis"))
    server.start()
    yield server
    server.stop()


def url(redis: EmbeddedRedis) -> SecretStr:
    return SecretStr(f"{redis.url}?socket_timeout=10&socket_connect_timeout=10")


async def test_state_survives(redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_state, "SAVE_SECONDS", 0.01)
    exported: list[QueueState | None] = [None, STATE]
    saved = asyncio.Event()

    async def export() -> QueueState | None:
        if not exported:
            saved.set()
            return None
        return exported.pop(0)

    keeper = QueueStateKeeper("model", url(redis))
    assert await keeper.load() is None
    keeping = asyncio.create_task(keeper.keep(export))
    await asyncio.wait_for(saved.wait(), 10)
    keeping.cancel()
    assert await QueueStateKeeper("model", url(redis)).load() == STATE
    assert await QueueStateKeeper("other", url(redis)).load() is None


async def test_without_redis_a_queue_starts_level_and_keeps_trying(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_state, "SAVE_SECONDS", 0.01)
    monkeypatch.setattr(queue_state, "LOAD_TIMEOUT_SECONDS", 0.2)

    class Moving:
        """The handle of an embedded Redis that listens somewhere else after a while."""

        asked = 0

        @property
        def url(self) -> Any:
            return self

        async def remote(self) -> str:
            self.asked += 1
            return "redis://127.0.0.1:1" if self.asked < 4 else url(redis).get_secret_value()

    async def export() -> QueueState:
        return STATE

    keeper = QueueStateKeeper("model", Moving())  # type: ignore[arg-type]
    assert await keeper.load() is None
    keeping = asyncio.create_task(keeper.keep(export))
    other = QueueStateKeeper("model", url(redis))
    for _ in range(500):
        if await other.load() is not None:
            break
        await asyncio.sleep(0.02)
    keeping.cancel()
    assert await other.load() == STATE
