"""A background task that is ended has ended."""

from __future__ import annotations

import asyncio

import pytest

from tenancy.tasks import end

pytestmark = pytest.mark.asyncio


async def test_who_ends_a_task_and_is_cancelled_meanwhile_waits_for_its_end() -> None:
    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)

    task = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end(task))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert task.done()
