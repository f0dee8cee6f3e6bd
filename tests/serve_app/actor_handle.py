"""Handles of actors that live in this process."""

from __future__ import annotations

from typing import Any

import ray


class Handle:
    """An actor's handle: the real actor's code, called here. A dead one answers nothing."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        self._name = name

    async def remote(self, *arguments: Any) -> Any:
        if self._handle.dead:
            raise ray.exceptions.ActorUnavailableError("nobody", None)
        return await getattr(self._handle.actor, self._name)(*arguments)
