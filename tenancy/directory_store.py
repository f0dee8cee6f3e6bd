"""Tenants and keys that are managed at run time, in Redis: changed with an audit entry, followed by gateways."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenancy.directory import TenantDirectory
from tenancy.guarded_redis import GuardedRedis, Script
from tenancy.layout import PREFIX, LayoutError, check_layout
from tenancy.models import KeyRecord, Tenant
from tenancy.tasks import end

logger = logging.getLogger(__name__)

_BLOCK_MS = 1000
_RETRY_S = 0.5


class ConflictError(Exception):
    """Somebody else changed the same tenant or key in the meantime. Nothing was written."""


@dataclass(frozen=True)
class Change:
    """One tenant or key from `before` (None: it was not managed) to `after`, of the same type and id. `was` is
    what held before for the audit, which may have been the config's."""

    action: str
    before: Tenant | KeyRecord | None
    after: Tenant | KeyRecord
    was: Tenant | KeyRecord | None = None


@dataclass(frozen=True)
class Unchanged:
    """A tenant that must be stored as it was read (None: it was not managed) for the changes beside it to be made."""

    id: str
    as_read: Tenant | None


@dataclass(frozen=True)
class AuditEntry:
    """Who changed what. `at` is in seconds since 1970; `before` and `after` show no secret."""

    id: str
    at: int
    who: str
    action: str
    kind: str
    subject: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class DirectoryStore:
    """Writes changes, reads all of it back."""

    def __init__(self, redis: Redis, guarded: GuardedRedis, prefix: str = PREFIX) -> None:
        self._redis: Any = redis  # its types leave open whether replies are decoded
        self._guarded = guarded
        self._script, self._read = Script("directory"), Script("read_directory")
        base = f"{prefix}:{{+directory}}:"  # no tenant has an id like this
        self._tenants, self._keys, self._audit = (base + name for name in ("tenants", "keys", "audit"))
        self._secret = base + "secret"

    async def apply(self, who: str, steps: Sequence[Change | Unchanged]) -> None:
        """Make the changes, all or none. Raises ConflictError, QuotaUnavailable."""
        args: list[str] = [who]
        for change in steps:
            if isinstance(change, Unchanged):
                args += ["1", change.id, _stored(change.as_read), "", "", "", ""]
                continue
            table = "1" if isinstance(change.after, Tenant) else "2"
            args += [table, change.after.id, _stored(change.before), _stored(change.after), change.action]
            args += [_shown(change.was), _shown(change.after)]
        keys = [self._tenants, self._keys, self._audit]
        if await self._guarded.run(self._script, keys, args):
            raise ConflictError("changed by somebody else in the meantime; read it again")

    async def audit(self, before: str | None = None, limit: int = 100) -> list[AuditEntry]:
        """The newest entries first, older than the entry with id `before`. Raises RedisError."""
        rows = await self._redis.xrevrange(self._audit, max=f"({before}" if before else "+", count=limit)
        return [_entry(id.decode(), fields) for id, fields in rows]

    async def load(self, directory: TenantDirectory) -> str:
        """Read all of it into `directory`; returns the id of the last change it has seen.

        Raises RedisError; LayoutError where the data or the server secret are not those of this gateway.
        """
        await check_layout(self._redis)
        check = directory.secret_check()
        await self._redis.set(self._secret, check, nx=True)
        if await self._redis.get(self._secret) != check.encode():
            raise LayoutError(
                "the keys in this Redis were made with another server secret: all gateways need the same "
                "server.secret in their data_dir"
            )
        last = await self._redis.xrevrange(self._audit, count=1)  # before the tables: nothing is missed
        # What a Redis that kept nothing has lost is put back: it must not bring a revoked key back to life.
        known_tenants, known_keys = directory.managed()
        args: list[str | int] = [len(known_tenants)]
        for id, value in (*known_tenants.items(), *known_keys.items()):
            args += [id, _stored(value)]
        restored, tenants, keys = await self._redis.eval(self._read.text, 2, self._tenants, self._keys, *args)
        if restored:
            logger.error("Redis had lost tenants and keys: they are put back from this gateway's memory")
        # In a thread: with thousands of tenants this takes a while, and answers are being streamed.
        parsed = await asyncio.to_thread(_parsed, tenants, keys)
        directory.update_managed(*parsed)
        return last[0][0].decode() if last else "0-0"

    async def follow(self, directory: TenantDirectory, last: str) -> str:
        """Wait a second for changes after `last` and take them. Needs a client that may block."""
        streams = await self._redis.xread({self._audit: last}, block=_BLOCK_MS)
        if not streams:
            return last
        _, rows = streams[0]
        changed = {(fields[b"kind"], fields[b"id"].decode()) for _, fields in rows}
        tenants: dict[str, Tenant] = {}
        keys: dict[str, KeyRecord] = {}
        for kind, id in changed:
            if kind == b"tenant" and (value := await self._redis.hget(self._tenants, id)) is not None:
                tenants[id] = Tenant.model_validate_json(value)
            elif kind == b"key" and (value := await self._redis.hget(self._keys, id)) is not None:
                keys[id] = KeyRecord.model_validate_json(value)
        directory.merge_managed(tenants, keys)
        last_id: bytes = rows[-1][0]
        return last_id.decode()


class DirectoryWatch:
    """Keeps a directory up to date: changes arrive at once, and after a broken connection all is read again.

    While Redis is away, the directory stays as it was; it is `complete` from the first answer on.
    """

    def __init__(self, store: DirectoryStore, directory: TenantDirectory) -> None:
        """`store` needs a client of its own whose reads may take longer than a second."""
        self._store = store
        self._directory = directory
        self._said = ""
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Stop following."""
        await end(self._task)

    async def _run(self) -> None:
        while True:
            try:
                last = await self._store.load(self._directory)
                self._say("")
                while True:
                    last = await self._store.follow(self._directory, last)
            except (RedisError, OSError) as error:
                self._say(f"tenants cannot be followed: {type(error).__name__}")
            except LayoutError as error:
                self._say(str(error))
            except Exception:
                logger.exception("tenants cannot be read")
            await asyncio.sleep(_RETRY_S)

    def _say(self, what: str) -> None:
        if what and what != self._said:
            logger.warning("%s", what)
        self._said = what


def _parsed(tenants: list[bytes], keys: list[bytes]) -> tuple[dict[str, Tenant], dict[str, KeyRecord]]:
    """From fields and values in turns."""
    return (
        {
            id.decode(): Tenant.model_validate_json(value)
            for id, value in zip(tenants[::2], tenants[1::2], strict=True)
        },
        {
            id.decode(): KeyRecord.model_validate_json(value)
            for id, value in zip(keys[::2], keys[1::2], strict=True)
        },
    )


def _stored(value: BaseModel | None) -> str:
    # What was stated, a default among it: it overrides a tier.
    return "" if value is None else value.model_dump_json(exclude_unset=True)


def _shown(value: BaseModel | None) -> str:
    if value is None:
        return ""
    return value.model_dump_json(exclude_unset=True, exclude={"digest", "api_keys"})


def _entry(id: str, fields: dict[bytes, bytes]) -> AuditEntry:
    text = {name.decode(): value.decode() for name, value in fields.items()}
    before, after = (json.loads(text[name]) if text[name] else None for name in ("before", "after"))
    return AuditEntry(
        id, int(text["at"]), text["who"], text["action"], text["kind"], text["id"], before, after
    )
