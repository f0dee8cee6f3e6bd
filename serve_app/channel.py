"""The channel between a gateway and an engine: requests one way, one message per step for all of them the other.

A gateway keeps one connection per engine and a mailbox per live request. It renews the lease of its live requests every
two seconds; a request without it is aborted by the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from engine_actor.actor import EngineDescription, EngineNotReadyError
from engine_actor.channel_messages import (
    Abort,
    Key,
    Renew,
    Submit,
    SubmitAnswer,
    pack_request,
    unpack_answer,
)
from engine_actor.message_socket import MessageConnection, connect
from engine_actor.request import EngineRequest, StreamRow
from serve_app.owner import find_actor
from serve_app.within import within

logger = logging.getLogger(__name__)

RENEW_SECONDS = 2.0
_RECONNECT_SECONDS = 0.2
_SUBMIT_TIMEOUT_SECONDS = 10.0
_DELIVERIES_AT_ONCE = 2
"""Of the rows of a step: between them others get their turns of the event loop, new requests above all."""


class EngineLostError(RuntimeError):
    """The engine died, or was replaced, before the request ended."""


class GrantVoidError(RuntimeError):
    """The engine did not take the request: the grant came too late or from an older authority. Ask again."""


class Delivery(NamedTuple):
    """Rows of one request from one step, with the engine's wall clock at its end."""

    rows: Sequence[StreamRow]
    wall_time_ns: int


class Mailbox:
    """What one attempt of a request (all its sequences) receives from its engine."""

    def __init__(self, keys: list[Key], attempt: int) -> None:
        self.keys = keys
        self.attempt = attempt
        self.delivered = False
        """Rows have come."""
        self._items: deque[Delivery | EngineLostError] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._give_up_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Delivery | EngineLostError) -> None:
        self.delivered = True
        self._items.append(item)
        self._wake()

    async def get(self, seconds: float) -> Delivery | None:
        """The next rows, None after so many seconds. Raises EngineLostError when there will be none.

        One reader at a time. A reader that is cancelled leaves the rows for the next one.
        """
        if not self._items:
            loop = asyncio.get_running_loop()
            self._arrival = loop.create_future()
            self._set_timer(loop, seconds)
            try:
                await self._arrival
            finally:
                self._arrival = None
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, EngineLostError):
            raise item
        return item

    def close(self) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """One timer serves many calls, most of which have their rows long before: it goes off too early, and on."""
        self._give_up_at = loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= self._give_up_at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(self._give_up_at, self._time_out, loop)

    def _time_out(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._arrival is None:
            return
        if loop.time() < self._give_up_at:
            self._timer = loop.call_at(self._give_up_at, self._time_out, loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class EngineChannel:
    """One engine as this gateway sees it: found by name, connected for ever, through its deaths and successors."""

    def __init__(self, engine: str, gateway: str) -> None:
        self._engine = engine
        self._gateway = gateway
        self._actor: Any = None
        self._connection: MessageConnection | None = None
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._submitted = 0
        self._mailboxes: dict[Key, Mailbox] = {}
        self._undelivered: deque[tuple[Mailbox, Delivery]] = deque()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._renew())]
        self.description: EngineDescription | None = None
        """The connected engine, None while there is none."""

    async def submit(self, requests: list[EngineRequest], attempt: int, engine_epoch: int) -> Mailbox:
        """Hand one attempt's requests to the engine of that epoch.

        Raises GrantVoidError when it did not take them, EngineLostError when it died on the way.
        """
        keys = [(request.request, request.attempt) for request in requests]
        if (
            self._connection is None
            or self.description is None
            or self.description.engine_epoch != engine_epoch
        ):
            raise GrantVoidError(f"engine {self._engine} of epoch {engine_epoch} is not connected")
        mailbox = Mailbox(keys, attempt)
        self._mailboxes.update(dict.fromkeys(keys, mailbox))
        loop = asyncio.get_running_loop()
        self._submitted = number = self._submitted + 1
        answer: asyncio.Future[None] = loop.create_future()
        self._answers[number] = answer
        timer = loop.call_later(_SUBMIT_TIMEOUT_SECONDS, self._fail, answer, "did not answer")
        try:
            self._connection.send(pack_request(Submit(number, requests)))
            await answer
        except GrantVoidError:
            self.close(mailbox)
            raise
        except BaseException:
            self.abort(keys)
            self.close(mailbox)
            raise
        finally:
            timer.cancel()
            del self._answers[number]
        return mailbox

    def abort(self, keys: list[Key]) -> None:
        """Ask the engine to end requests, without waiting. Their last rows still come."""
        self._send(Abort(keys))

    def close(self, mailbox: Mailbox) -> None:
        """Stop receiving for a request. Safe to call twice."""
        for key in mailbox.keys:
            if self._mailboxes.get(key) is mailbox:
                del self._mailboxes[key]
        mailbox.close()

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
                    await self._connect(actor)
            except EngineNotReadyError:
                pass
            except (ray.exceptions.RayError, OSError) as error:
                logger.info("no connection to engine %s: %s", self._engine, type(error).__name__)
            except Exception:  # a gateway without its engine must not stay so
                logger.exception("the connection to engine %s ends", self._engine)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _connect(self, actor: Any) -> None:
        """Until the connection is lost."""
        description = await actor.describe.remote()
        address = await actor.open_channel.remote(self._gateway)
        lost = asyncio.Event()

        def hear(data: bytes) -> None:
            message = unpack_answer(data)
            if isinstance(message, SubmitAnswer):
                self._answer(message)
                return
            if self.description is None:
                self._actor, self._connection, self.description = actor, connection, description
                logger.info("connected to engine %s, epoch %d", self._engine, description.engine_epoch)
            self._deliver(message.rows, message.wall_time_ns)

        connection = await connect(address, hear, lost.set)
        try:
            await lost.wait()
            logger.info("the connection to engine %s is lost", self._engine)
        finally:
            connection.close()
            self._lose()

    def _send(self, message: Abort | Renew) -> None:
        if self._connection is not None:
            self._connection.send(pack_request(message))

    def _answer(self, message: SubmitAnswer) -> None:
        answer = self._answers.get(message.number)
        if answer is None or answer.done():
            return
        if message.refusal is None:
            answer.set_result(None)
        else:
            answer.set_exception(GrantVoidError(message.refusal))

    def _fail(self, answer: asyncio.Future[None], how: str) -> None:
        if not answer.done():
            answer.set_exception(EngineLostError(f"engine {self._engine} {how}"))

    def _deliver(self, rows: tuple[StreamRow, ...], wall_time_ns: int) -> None:
        """Sort rows by mailbox. Whoever waits for a first token gets it before the others get their next one."""
        first: dict[Mailbox, list[StreamRow]] = {}
        later: dict[Mailbox, list[StreamRow]] = {}
        for row in rows:
            key = (row.request, row.attempt)
            mailbox = self._mailboxes.get(key)
            if mailbox is None:
                continue
            part = later if mailbox.delivered else first
            if (own := part.get(mailbox)) is None:
                part[mailbox] = [row]
            else:
                own.append(row)
            if row.finish_reason is not None:
                del self._mailboxes[key]
        for mailbox, own in first.items():
            mailbox.put(Delivery(own, wall_time_ns))
        under_way = bool(self._undelivered)
        self._undelivered.extend([(mailbox, Delivery(own, wall_time_ns)) for mailbox, own in later.items()])
        if not under_way:
            self._deliver_some()

    def _deliver_some(self) -> None:
        undelivered = self._undelivered
        for _ in range(min(_DELIVERIES_AT_ONCE, len(undelivered))):
            mailbox, delivery = undelivered.popleft()
            mailbox.put(delivery)
        if undelivered:
            asyncio.get_running_loop().call_soon(self._deliver_some)

    def _lose(self) -> None:
        self._actor, self._connection, self.description = None, None, None
        while self._undelivered:
            mailbox, delivery = self._undelivered.popleft()
            mailbox.put(delivery)
        lost = {id(mailbox): mailbox for mailbox in self._mailboxes.values()}
        self._mailboxes.clear()
        for mailbox in lost.values():
            mailbox.put(EngineLostError(f"engine {self._engine} was lost"))
        for answer in self._answers.values():
            self._fail(answer, "was lost")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            self._send(Renew(list(self._mailboxes)))
