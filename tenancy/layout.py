"""What the keys in Redis mean: a version of their layout, and the way from an older one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

LAYOUT = 2
PREFIX = f"eh:v{LAYOUT}"
"""Of every key."""

_VERSION_KEY = "eh:layout"


class LayoutError(Exception):
    """The data in Redis is not for this version. The message says why in one line."""


async def _nothing_to_carry(redis: Redis) -> None:
    """Layout 1 had rates and leases alone, which are gone by themselves within a minute."""


_MIGRATIONS: dict[int, Callable[[Redis], Awaitable[None]]] = {1: _nothing_to_carry}
"""From a layout to the next one. Each may run again after it was cut short."""


async def check_layout(redis: Redis) -> None:
    """Bring older data to this layout. Raises LayoutError for newer data, RedisError."""
    found = await redis.get(_VERSION_KEY)
    version = LAYOUT if found is None else int(found)
    if version > LAYOUT:
        raise LayoutError(
            f"this Redis holds data of a newer version (layout {version}, known here is {LAYOUT}): "
            "use that version, or another database"
        )
    for step in range(version, LAYOUT):
        await _MIGRATIONS[step](redis)
    if found is None or version < LAYOUT:
        await redis.set(_VERSION_KEY, LAYOUT)
