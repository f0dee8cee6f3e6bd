"""Answers by idempotency key: a call that is sent again gets the answer of its first run, on any gateway.

A run holds its key by a lease, so that the key of a gateway that dies is free again soon. Only answers are kept, not
refusals: after one of those the same key runs again.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import Enum

from tenancy.guarded_redis import GuardedRedis, Script
from tenancy.quota import PREFIX

LEASE_MS = 30_000
KEEP_MS = 600_000
MAX_ANSWER_BYTES = 256 * 1024
"""A longer answer is not kept: the same key then runs again."""

_CLAIM, _CLAIMED = Script("claim"), Script("claimed")


class Claimed(Enum):
    """Why there is no answer to give yet."""

    RUNNING = "running"
    """The first run has not ended: ask again."""
    CONFLICT = "other"
    """The key was used with another request."""


@dataclass(frozen=True)
class Claim:
    """The right to run the request of one key. End it with `answer` or `drop`; `keep` it every few seconds.

    All raise QuotaUnavailable, after which the lease lapses by itself.
    """

    redis: GuardedRedis
    key: str
    id: str

    async def keep(self) -> None:
        await self._call("keep", LEASE_MS)

    async def answer(self, content: bytes) -> None:
        """Keep the answer for KEEP_MS."""
        if len(content) > MAX_ANSWER_BYTES:
            await self.drop()
        else:
            await self._call("answer", KEEP_MS, content.decode())

    async def drop(self) -> None:
        """There is no answer: the key is free."""
        await self._call("drop", 0)

    async def _call(self, what: str, ms: int, content: str = "") -> None:
        await self.redis.run(_CLAIMED, [self.key], [self.id, what, ms, content])


async def claim(
    redis: GuardedRedis, tenant: str, key: str, request: str, prefix: str = PREFIX
) -> Claim | Claimed | bytes:
    """Ask to run a request; the bytes are the answer of its first run.

    `key` and `request` are fingerprints: of the client's key and of all that decides the answer. Raises
    QuotaUnavailable.
    """
    claim = Claim(redis, f"{prefix}:{{{tenant}}}:idempotency:{key}", uuid.uuid4().hex)
    reply = await redis.run(_CLAIM, [claim.key], [request, claim.id, LEASE_MS])
    if isinstance(reply, list):
        return bytes(reply[0])
    return claim if reply == b"mine" else Claimed(reply.decode())
