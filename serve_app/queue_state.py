"""The counters of a pool's fair queue in Redis: written each second, read once by its successor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from pydantic import SecretStr, TypeAdapter, ValidationError
from ray.serve.handle import DeploymentHandle

from policies.service_accounts import QueueState
from serve_app.within import within
from tenancy.redis import connect
from tenancy.snapshots import SnapshotError, SnapshotStore

logger = logging.getLogger(__name__)

SAVE_SECONDS = 1.0
LOAD_TIMEOUT_SECONDS = 3.0
"""A queue does not wait longer for its predecessor's counters: without them all start level."""

_STATE = TypeAdapter(QueueState)


class QueueStateKeeper:
    """Keeps one queue's state. `redis` is a URL, or the deployment of the embedded Redis, which tells its own."""

    def __init__(self, model: str, redis: SecretStr | DeploymentHandle[Any]) -> None:
        self._name = f"fair-queue/{model}"
        self._redis = redis
        self._url: str | None = None
        self._store: SnapshotStore | None = None
        self._failing = False

    async def load(self) -> QueueState | None:
        """What the predecessor had counted; None when there is nothing, or Redis does not answer in time."""
        try:
            text = await within(LOAD_TIMEOUT_SECONDS, self._load())
            return None if text is None else _STATE.validate_json(text)
        except (SnapshotError, ray.exceptions.RayError, asyncio.TimeoutError, ValidationError) as error:
            logger.warning("no earlier counters for %s: %s", self._name, type(error).__name__)
            return None

    async def keep(self, export: Callable[[], Awaitable[QueueState | None]]) -> None:
        """Save what `export` gives, each second, for ever. None is not saved."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            try:
                state = await export()
                if state is not None:
                    await self._save(_STATE.dump_json(state).decode())
                    self._failing = False
            except (SnapshotError, ray.exceptions.RayError, asyncio.TimeoutError) as error:
                self._url = None  # it may listen somewhere else by now
                if not self._failing:
                    logger.warning("the counters of %s are not saved: %s", self._name, type(error).__name__)
                self._failing = True

    async def _load(self) -> str | None:
        return await (await self._connected()).load(self._name)

    async def _save(self, text: str) -> None:
        await (await self._connected()).save(self._name, text)

    async def _connected(self) -> SnapshotStore:
        if self._store is None or self._url is None:
            if isinstance(self._redis, SecretStr):
                url = self._redis.get_secret_value()
            else:
                url = await self._redis.url.remote()
            if self._store is not None:
                await self._store.aclose()
            self._url, self._store = url, SnapshotStore(connect(url))
        return self._store
