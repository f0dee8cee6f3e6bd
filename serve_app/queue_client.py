"""A gateway's connection to a fair queue: tickets one way, grants and refusals the other, for all of its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import ray

from engine_actor.message_socket import MessageConnection, connect
from policies.guardrails import ProtectionLines
from policies.tickets import Grant, Refusal, Ticket
from serve_app.output_lengths import SharedOutputLengths
from serve_app.owner import find_actor
from serve_app.queue_messages import QueueSnapshot, Tell, Withdraw, pack_question, unpack_reply
from serve_app.within import within

logger = logging.getLogger(__name__)

TELL_SECONDS = 1.0
_STALE_SECONDS = 3.0
_SILENT_SECONDS = 6.0
_RECONNECT_SECONDS = 0.2


class QueueLostError(RuntimeError):
    """No fair queue is connected, or it was lost before it answered. Ask again, with the age reached by then."""


class QueueClient:
    """One fair queue as this gateway sees it: found by name, connected for ever, through its deaths and successors.

    Once a second it tells the queue that the gateway is there, with what `output_lengths` has to tell, and learns the
    queue's state.
    """

    def __init__(self, queue: str, gateway: str, output_lengths: SharedOutputLengths) -> None:
        self.protection_lines = ProtectionLines()
        self._name = queue
        self._gateway = gateway
        self._output_lengths = output_lengths
        self._untold: tuple[tuple[str, int], ...] = ()  # not known to have been heard
        self._connection: MessageConnection | None = None
        self._waiting: dict[tuple[str, int], asyncio.Future[Grant | Refusal]] = {}
        self._snapshot: QueueSnapshot | None = None
        self._heard_at = 0.0
        self._task = asyncio.create_task(self._follow())

    @property
    def snapshot(self) -> QueueSnapshot | None:
        """The queue as it was within the last seconds; None while it does not answer."""
        return self._snapshot if time.monotonic() - self._heard_at < _STALE_SECONDS else None

    async def ask(self, ticket: Ticket) -> Grant | Refusal:
        """Wait for a ticket's turn. Asking again is safe at any time. Raises QueueLostError."""
        if self._connection is None:
            raise QueueLostError("no fair queue is connected")
        key = (ticket.request, ticket.attempt)
        answer: asyncio.Future[Grant | Refusal] = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        try:
            self._connection.send(pack_question(ticket))
            return await answer
        finally:
            del self._waiting[key]

    def withdraw(self, ticket: Ticket) -> None:
        """The ticket is no longer wanted. Does not wait."""
        if self._connection is not None:
            self._connection.send(pack_question(Withdraw(ticket.request, ticket.attempt)))

    def stop(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                queue = find_actor(self._name)
                if queue is not None:
                    await self._connect(queue)
            except (ray.exceptions.RayError, OSError) as error:
                logger.warning("no connection to %s: %s", self._name, type(error).__name__)
            except Exception:  # a gateway without its queue must not stay so
                logger.exception("the connection to %s ends", self._name)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _connect(self, queue: Any) -> None:
        """Until the connection is lost, or the queue is silent."""
        lost = asyncio.Event()

        def hear(data: bytes) -> None:
            reply = unpack_reply(data)
            if isinstance(reply, QueueSnapshot):
                if self._connection is None:
                    logger.info("connected to %s, epoch %d", self._name, reply.queue_epoch)
                self._connection = connection
                self._learn(reply)
            else:
                self._answer(reply)

        address = await queue.open_exchange.remote(self._gateway)
        connection = await connect(address, hear, lost.set)
        self._heard_at = time.monotonic()
        try:
            while not lost.is_set():
                if time.monotonic() - self._heard_at > _SILENT_SECONDS:
                    logger.warning("%s was silent for %.0f s", self._name, _SILENT_SECONDS)
                    return
                told = () if self._untold else self._output_lengths.take_untold()
                self._untold = self._untold or told
                connection.send(pack_question(Tell(self.protection_lines, told)))
                with suppress(asyncio.TimeoutError):
                    await within(TELL_SECONDS, lost.wait())
        finally:
            connection.close()
            self._lose()

    def _learn(self, snapshot: QueueSnapshot) -> None:
        self._snapshot, self._heard_at = snapshot, time.monotonic()
        self._untold = ()
        self._output_lengths.learn(snapshot.output_lengths)

    def _answer(self, reply: Grant | Refusal) -> None:
        answer = self._waiting.get((reply.request, reply.attempt))
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _lose(self) -> None:
        self._connection, self._snapshot = None, None
        self._output_lengths.put_back(self._untold)
        self._untold = ()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(QueueLostError("the fair queue was lost"))
