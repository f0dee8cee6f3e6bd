"""Small texts in Redis that a successor of a process reads: state that may be seconds old, never a source of truth."""

from __future__ import annotations

from datetime import timedelta

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenancy.quota import PREFIX

KEPT_FOR = timedelta(hours=1)


class SnapshotError(RuntimeError):
    """Redis did not take or give a snapshot."""


class SnapshotStore:
    """Snapshots by name; a new one takes the place of the old one. They are forgotten an hour after the last."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def save(self, name: str, text: str) -> None:
        """Raises SnapshotError."""
        try:
            await self._redis.set(_key(name), text, ex=KEPT_FOR)
        except (RedisError, OSError) as error:
            raise SnapshotError(type(error).__name__) from None

    async def load(self, name: str) -> str | None:
        """The text saved last, None if there is none. Raises SnapshotError."""
        try:
            text = await self._redis.get(_key(name))
        except (RedisError, OSError) as error:
            raise SnapshotError(type(error).__name__) from None
        return text.decode() if isinstance(text, bytes) else text

    async def aclose(self) -> None:
        await self._redis.aclose()


def _key(name: str) -> str:
    return f"{PREFIX}:snapshot:{name}"
