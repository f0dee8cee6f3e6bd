"""A time limit on an await that never swallows a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, or asyncio.TimeoutError after so many seconds.

    asyncio.wait_for of Python 3.10 and 3.11 returns the result, and forgets the cancellation, when both come in the
    same turn of the loop: a request whose client has left would go on.
    """
    work = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({work}, timeout=seconds)
        if not work.done():
            raise asyncio.TimeoutError
    finally:
        work.cancel()
    return work.result()
