"""The channel from engines to a gateway: one multiplexed stream per engine, one message per step.

A gateway keeps one reader per engine and a mailbox per live request. It renews the lease of its live requests every
two seconds; a request without it is aborted by the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from engine_actor.actor import EngineDescription, EngineNotReadyError, StaleEpochError
from engine_actor.request import EngineRequest, StreamRow
from serve_app.owner import find_actor
from serve_app.within import within

logger = logging.getLogger(__name__)

RENEW_SECONDS = 2.0
_RECONNECT_SECONDS = 0.2
_SUBMIT_TIMEOUT_SECONDS = 10.0

Key = tuple[str, int]


class EngineLostError(RuntimeError):
    """The engine died, or was replaced, before the request ended."""


class GrantVoidError(RuntimeError):
    """The engine did not take the request: the grant came too late or from an older authority. Ask again."""


@dataclass(frozen=True)
class Delivery:
    """Rows of one request from one step, with the engine's wall clock at its end."""

    rows: tuple[StreamRow, ...]
    wall_time_ns: int


class Mailbox:
    """What one attempt of a request (all its sequences) receives from its engine."""

    def __init__(self, keys: list[Key], attempt: int) -> None:
        self.keys = keys
        self.attempt = attempt
        self._items: deque[Delivery | EngineLostError] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, item: Delivery | EngineLostError) -> None:
        self._items.append(item)
        self._wake()

    async def get(self, seconds: float) -> Delivery | None:
        """The next rows, None after so many seconds. Raises EngineLostError when there will be none.

        One reader at a time. A reader that is cancelled leaves the rows for the next one.
        """
        if not self._items:
            loop = asyncio.get_running_loop()
            self._arrival = loop.create_future()
            timer = loop.call_later(seconds, self._wake)
            try:
                await self._arrival
            finally:
                timer.cancel()
                self._arrival = None
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, EngineLostError):
            raise item
        return item

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class EngineChannel:
    """One engine as this gateway sees it: found by name, read for ever, through its deaths and successors."""

    def __init__(self, engine: str, gateway: str) -> None:
        self._engine = engine
        self._gateway = gateway
        self._actor: Any = None
        self._mailboxes: dict[Key, Mailbox] = {}
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._renew())]
        self.description: EngineDescription | None = None
        """The connected engine, None while there is none."""

    async def submit(self, requests: list[EngineRequest], attempt: int, engine_epoch: int) -> Mailbox:
        """Hand one attempt's requests to the engine of that epoch.

        Raises GrantVoidError when it did not take them, EngineLostError when it died on the way.
        """
        keys = [(request.request, request.attempt) for request in requests]
        if self.description is None or self.description.engine_epoch != engine_epoch:
            raise GrantVoidError(f"engine {self._engine} of epoch {engine_epoch} is not connected")
        mailbox = Mailbox(keys, attempt)
        self._mailboxes.update(dict.fromkeys(keys, mailbox))
        try:
            await within(_SUBMIT_TIMEOUT_SECONDS, self._actor.submit.remote(self._gateway, requests))
        except (StaleEpochError, EngineNotReadyError) as error:
            self.close(mailbox)
            raise GrantVoidError(str(error)) from None
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            self.abort(keys)
            self.close(mailbox)
            raise EngineLostError(f"engine {self._engine} did not answer: {type(error).__name__}") from None
        except BaseException:
            self.abort(keys)
            self.close(mailbox)
            raise
        return mailbox

    def abort(self, keys: list[Key]) -> None:
        """Ask the engine to end requests, without waiting. Their last rows still come."""
        if self._actor is not None:
            self._actor.abort.remote(keys)

    def close(self, mailbox: Mailbox) -> None:
        """Stop receiving for a request. Safe to call twice."""
        for key in mailbox.keys:
            if self._mailboxes.get(key) is mailbox:
                del self._mailboxes[key]

    async def stats(self) -> Any:
        """The engine's counters, or None when it does not answer."""
        if self._actor is None:
            return None
        try:
            return await within(1.0, self._actor.stats.remote())
        except (ray.exceptions.RayError, asyncio.TimeoutError):
            return None

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                actor = find_actor(self._engine)
                if actor is not None:
                    await self._read(actor)
            except EngineNotReadyError:
                pass
            except ray.exceptions.RayError as error:
                logger.info("the stream of engine %s ends: %s", self._engine, type(error).__name__)
            self._lose()
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _read(self, actor: Any) -> None:
        description = await actor.describe.remote()
        stream = actor.stream.options(num_returns="streaming").remote(self._gateway)
        async for reference in stream:
            message = await reference
            if self.description is None:
                self._actor, self.description = actor, description
                logger.info("connected to engine %s, epoch %d", self._engine, description.engine_epoch)
            self._deliver(message.rows, message.wall_time_ns)

    def _deliver(self, rows: tuple[StreamRow, ...], wall_time_ns: int) -> None:
        by_mailbox: dict[int, tuple[Mailbox, list[StreamRow]]] = {}
        for row in rows:
            key = (row.request, row.attempt)
            mailbox = self._mailboxes.get(key)
            if mailbox is None:
                continue
            by_mailbox.setdefault(id(mailbox), (mailbox, []))[1].append(row)
            if row.finish_reason is not None:
                del self._mailboxes[key]
        for mailbox, own in by_mailbox.values():
            mailbox.put(Delivery(tuple(own), wall_time_ns))

    def _lose(self) -> None:
        self._actor, self.description = None, None
        lost = {id(mailbox): mailbox for mailbox in self._mailboxes.values()}
        self._mailboxes.clear()
        for mailbox in lost.values():
            mailbox.put(EngineLostError(f"engine {self._engine} was lost"))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            if self._actor is not None:
                self._actor.renew_requests.remote(self._gateway, list(self._mailboxes))
