"""Ending a background task for certain."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task until it has ended: `asyncio.wait_for` of Python 3.10 and 3.11, which the Redis client uses,
    may swallow a cancellation."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
