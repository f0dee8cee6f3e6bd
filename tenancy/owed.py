"""Endings of holds that Redis has not confirmed: sent again until it does, and never lost from the ledger."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tenancy.guarded_redis import QuotaUnavailable, Script
from tenancy.ledger import LedgerRow
from tenancy.tasks import end

logger = logging.getLogger(__name__)

SENT_AGAIN_FOR_S = 600.0
"""An ending that may have been made already. Less than DONE_MS: until then a second one is known as such."""

DONE_MS = 900_000
MAX_OWED = 100_000
_RETRY_S = 0.2


@dataclass
class Ending:
    """A settlement with its ledger row, or a void without. Both may safely be sent again.

    `maybe_made_at` is when it was first sent (monotonic seconds); one that never was is certainly not made.
    """

    script: Script
    tenant: str
    hold_id: str
    args: list[str | int]
    row: LedgerRow | None = None
    maybe_made_at: float | None = None


class OwedEndings:
    """What is still to be told to Redis, in order. Call it on the loop."""

    def __init__(
        self,
        send: Callable[[Ending], Awaitable[None]],
        unconfirmed: Callable[[list[LedgerRow]], None] | None,
    ) -> None:
        """`send` raises QuotaUnavailable. `unconfirmed` keeps rows that Redis may not have; it is called in a thread.
        Without it they are logged."""
        self._send = send
        self._unconfirmed = unconfirmed
        self._owed: dict[str, Ending] = {}
        self._repaying: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._owed)

    def __contains__(self, hold_id: str) -> bool:
        return hold_id in self._owed

    def add(self, ending: Ending, *, maybe_made: bool) -> None:
        """Send it again from now on, in the background."""
        if maybe_made:
            ending.maybe_made_at = time.monotonic()
        self._owed.setdefault(ending.hold_id, ending)
        if self._repaying is None or self._repaying.done():
            self._repaying = asyncio.create_task(self._repay())

    async def aclose(self) -> None:
        """Give up what is left: holds lapse with their leases, rows are kept elsewhere."""
        await end(self._repaying)
        await self._give_up(list(self._owed.values()))

    async def _repay(self) -> None:
        while self._owed:
            hold_id, ending = next(iter(self._owed.items()))
            try:
                await self._send(ending)
                del self._owed[hold_id]
            except QuotaUnavailable as error:
                if error.maybe_applied and ending.maybe_made_at is None:
                    ending.maybe_made_at = time.monotonic()
                await self._give_up(self._too_old())
                await asyncio.sleep(_RETRY_S)

    def _too_old(self) -> list[Ending]:
        before = time.monotonic() - SENT_AGAIN_FOR_S
        owed = list(self._owed.values())
        too_many = owed[: max(0, len(owed) - MAX_OWED)]
        return too_many + [
            ending
            for ending in owed[len(too_many) :]
            if ending.maybe_made_at is not None and ending.maybe_made_at < before
        ]

    async def _give_up(self, endings: Sequence[Ending]) -> None:
        rows = [ending.row for ending in endings if ending.row is not None]
        if rows:
            logger.error("Redis never confirmed the usage of %d requests: no budget counts it", len(rows))
            await self._keep(rows)
        for ending in endings:
            self._owed.pop(ending.hold_id, None)

    async def _keep(self, rows: list[LedgerRow]) -> None:
        if self._unconfirmed is not None:
            try:
                await asyncio.to_thread(self._unconfirmed, rows)
                return
            except (OSError, sqlite3.Error) as error:
                logger.error("nor can it be written to the ledger: %s", error)
        for row in rows:
            logger.error("usage without a ledger row: %s %s", row.hold, json.dumps(row.fields))
