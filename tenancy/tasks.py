"""Ending a background task for certain."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task until it has ended: `asyncio.wait_for` of Python 3.10 and 3.11, which the Redis client uses,
    may swallow a cancellation.

    Whoever is cancelled meanwhile, even twice, goes on only when the task has ended: a connection that it still reads
    must not get into other hands.
    """
    cancelled: asyncio.CancelledError | None = None
    while task is not None and not task.done():
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=0.1)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
