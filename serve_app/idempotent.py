"""The `Idempotency-Key` header: a whole answer that is asked for again is the answer of the first run.

The first run is charged, the others are not. Who comes while it runs waits for it. Another request under the same
key is a conflict. What is kept is in Redis, so it does not matter which gateway is asked.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from serve_app.api.errors import ApiError, idempotency_conflict, invalid_request
from serve_app.connection import Connection
from tenancy.guarded_redis import GuardedRedis, QuotaUnavailable
from tenancy.idempotency import LEASE_MS, Claim, Claimed, claim

logger = logging.getLogger(__name__)

HEADER = "idempotency-key"
MAX_KEY_CHARACTERS = 255
REPLAYED = {"idempotent-replayed": "true"}
_ASK_AGAIN_SECONDS = 0.1


def idempotency_key(connection: Connection, stream: bool) -> str | None:
    """The key of a request, None without one. Raises ApiError 400."""
    keys = connection.headers.getlist(HEADER)
    if not keys:
        return None
    if len(keys) > 1:
        raise invalid_request("Idempotency-Key: must be sent once.", "Idempotency-Key")
    [key] = keys
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise invalid_request(
            f"Idempotency-Key: must have 1 to {MAX_KEY_CHARACTERS} characters.", "Idempotency-Key"
        )
    if stream:
        raise invalid_request("stream: a streamed answer cannot be repeated by an Idempotency-Key.", "stream")
    return key


@dataclass(frozen=True)
class Repeatable:
    """A request with an idempotency key: `key` and `request` are digests of it and of all that decides the answer."""

    redis: GuardedRedis
    tenant: str
    key: str
    request: str

    async def begin(self) -> FirstRun | bytes:
        """The right to run, or the answer that is there already, waiting for it if need be. Raises ApiError."""
        while True:
            try:
                outcome = await claim(self.redis, self.tenant, self.key, self.request)
            except QuotaUnavailable:
                raise ApiError(
                    "quota_store_unavailable", "The quota store does not answer. Try again shortly."
                ) from None
            if outcome is Claimed.CONFLICT:
                raise idempotency_conflict()
            if isinstance(outcome, Claim):
                return FirstRun(outcome)
            if isinstance(outcome, bytes):
                return outcome
            await asyncio.sleep(_ASK_AGAIN_SECONDS)


class FirstRun:
    """Holds a key while its request runs."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._kept = False
        self._keeping = asyncio.create_task(self._keep())

    async def answer(self, content: bytes) -> None:
        """Keep the answer. Redis in trouble costs the repetition, not the answer."""
        try:
            await self._claim.answer(content)
            self._kept = True
        except QuotaUnavailable:
            logger.warning("an answer could not be kept under its idempotency key")

    async def end(self) -> None:
        """Without an answer the key is free again."""
        self._keeping.cancel()
        if not self._kept:
            try:
                await self._claim.drop()
            except QuotaUnavailable:
                logger.info("an idempotency key could not be freed: its lease will lapse")

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 3000)
            try:
                await self._claim.keep()
            except QuotaUnavailable:
                logger.warning("the lease of an idempotency key could not be renewed")
