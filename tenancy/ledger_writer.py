"""Moves usage rows from the tenants' streams in Redis to the ledger's files. One gateway at a time does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
import uuid
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenancy.guarded_redis import QuotaUnavailable, Script
from tenancy.layout import PREFIX
from tenancy.ledger import LedgerFiles, LedgerRow
from tenancy.quota import QuotaStore
from tenancy.tasks import end

logger = logging.getLogger(__name__)

ROUND_S = 1.0
SWEEP_S = 10.0
_LEASE_MS = 15_000
_BATCH = 500


class LedgerWriter:
    """Runs in every gateway; the one that holds the lease in Redis writes.

    A row leaves its stream after it is on disk, and the files take each hold once: a crash at any point loses
    none and doubles none. Gateways tell which tenants have new rows. Every SWEEP_S all streams are looked
    for, which finds what a dead gateway could not tell, and holds that it left behind.
    """

    def __init__(self, redis: Redis, store: QuotaStore, files: LedgerFiles, prefix: str = PREFIX) -> None:
        self._redis: Any = redis  # its types leave open whether replies are decoded
        self._store = store
        self._files = files
        self._prefix = prefix
        self._told = f"{prefix}:{{+ledger}}:told"
        self._lease = f"{prefix}:{{+ledger}}:writer"
        self._id = uuid.uuid4().hex
        self._lead = Script("lead")
        self._failed = ""
        self._next_sweep = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Work until `aclose`. Call it on the loop."""
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Write what there is and stop. Another gateway goes on as soon as the lease has run out."""
        await end(self._task)
        with contextlib.suppress(RedisError, OSError, sqlite3.Error, QuotaUnavailable):
            await self.round()

    async def round(self) -> int:
        """Tell what is new and, with the lease, write it. Returns the number of rows written.

        Raises RedisError, OSError, sqlite3.Error, QuotaUnavailable.
        """
        told = self._store.take_settled_tenants()
        try:
            if told:
                await self._redis.sadd(self._told, *told)
        except BaseException:
            self._store.put_settled_tenants(told)
            raise
        claimed = await self._redis.eval(self._lead.text, 1, self._lease, self._id, _LEASE_MS)
        if not claimed:
            self._next_sweep = 0.0  # with the lease comes what its last holder left undone
            return 0
        written = 0
        if time.monotonic() >= self._next_sweep:
            written = await self._sweep()
            self._next_sweep = time.monotonic() + SWEEP_S
        while tenants := await self._redis.spop(self._told, 100):
            for tenant in tenants:
                written += await self._drain(f"{self._prefix}:{{{tenant.decode()}}}:ledger")
        return written

    async def _sweep(self) -> int:
        ledgers: set[str] = set()
        async for key in self._redis.scan_iter(match=f"{self._prefix}:{{*}}:le*", count=1000):
            base, _, name = key.decode().rpartition(":")
            if name in ("leases", "ledger"):
                ledgers.add(f"{base}:ledger")
            if name == "leases":
                await self._store.sweep(base.partition("{")[2].removesuffix("}"))
        return sum([await self._drain(stream) for stream in sorted(ledgers)])

    async def _drain(self, stream: str) -> int:
        written = 0
        while entries := await self._redis.xrange(stream, count=_BATCH):
            rows = [
                LedgerRow(fields[b"hold"].decode(), int(fields[b"at"]), json.loads(fields[b"row"]))
                for _, fields in entries
            ]
            await asyncio.to_thread(self._files.write, rows)
            await self._redis.xdel(stream, *(id for id, _ in entries))
            written += len(rows)
        return written

    async def _run(self) -> None:
        while True:
            try:
                await self.round()
                self._failed = ""
            except (RedisError, OSError, sqlite3.Error, QuotaUnavailable) as error:
                self._next_sweep = 0.0
                if self._failed != type(error).__name__:
                    self._failed = type(error).__name__
                    logger.warning("usage rows wait in Redis: %s: %s", self._failed, error)
            except Exception:
                logger.exception("usage rows wait in Redis")
            await asyncio.sleep(ROUND_S)
