"""The gateways of an engine: what each has asked for, and the rows of every step on their way to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from engine_actor.channel_messages import (
    Abort,
    Key,
    StepMessage,
    Submit,
    SubmitAnswer,
    pack_answer,
    unpack_request,
)
from engine_actor.message_socket import MessageConnection
from engine_actor.request import EngineRequest, StreamRow

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""A request that its gateway has not named for so long is aborted; a gateway that is silent for so long is cut off."""


class NotTakenError(RuntimeError):
    """The engine does not take a request; the text says why."""


class _Gateway:
    """One connected gateway."""

    def __init__(self, connection: MessageConnection) -> None:
        self.connection = connection
        self.heard_at = time.monotonic()
        self.live: dict[Key, float] = {}  # request -> lease expiry


class Gateways:
    """Every connected gateway. Requests of one that is lost are aborted.

    `take` hands requests to the engine, all or none, or raises NotTakenError; `abort` ends one. One event loop.
    """

    def __init__(self, take: Callable[[list[EngineRequest]], None], abort: Callable[[Key], None]) -> None:
        self._take = take
        self._abort = abort
        self._connected: set[_Gateway] = set()
        self._gateway_of: dict[Key, _Gateway] = {}

    @property
    def live_requests(self) -> int:
        """Requests whose last row has not been made."""
        return len(self._gateway_of)

    def accept(self, connection: MessageConnection, hello: StepMessage) -> None:
        """A gateway has connected. It is told `hello`, so that it knows that it is in."""
        gateway = _Gateway(connection)
        self._connected.add(gateway)
        connection.on_message = lambda data: self._hear(gateway, data)
        connection.on_lost = lambda: self._lose(gateway)
        connection.send(pack_answer(hello))

    def dispatch(
        self, rows: Iterable[StreamRow], message: Callable[[tuple[StreamRow, ...]], StepMessage]
    ) -> None:
        """Send the rows of a step, one message to each gateway that has any, and before it one with the first tokens:
        whoever waits for those does not wait until the others are packed and read."""
        by_gateway: dict[_Gateway, list[StreamRow]] = {}
        for row in rows:
            key = (row.request, row.attempt)
            gateway = self._gateway_of.get(key)
            if gateway is None:
                continue
            if row.finish_reason is not None:
                del self._gateway_of[key]
                gateway.live.pop(key, None)
            by_gateway.setdefault(gateway, []).append(row)
        for gateway, own in by_gateway.items():
            for part in _first_tokens_first(own):
                gateway.connection.send(pack_answer(message(tuple(part))))

    def expire(self, now: float) -> None:
        """Abort the requests whose lease has run out, and cut off gateways that are silent."""
        for gateway in list(self._connected):
            for key in [key for key, expiry in gateway.live.items() if expiry < now]:
                logger.warning("request %s lost its gateway: aborted", key[0])
                self._abort(key)
                del gateway.live[key]
            if now - gateway.heard_at > LEASE_SECONDS:
                logger.warning("a gateway was silent for %.0f s: cut off", LEASE_SECONDS)
                gateway.connection.close()

    def _hear(self, gateway: _Gateway, data: bytes) -> None:
        message = unpack_request(data)
        gateway.heard_at = now = time.monotonic()
        if isinstance(message, Submit):
            gateway.connection.send(pack_answer(SubmitAnswer(message.number, self._submit(gateway, message))))
        elif isinstance(message, Abort):
            for key in message.keys:
                self._abort(key)
        else:
            for key in message.keys:
                if key in gateway.live:
                    gateway.live[key] = now + LEASE_SECONDS

    def _submit(self, gateway: _Gateway, submit: Submit) -> str | None:
        try:
            self._take(submit.requests)
        except NotTakenError as error:
            return str(error)
        for request in submit.requests:
            key = (request.request, request.attempt)
            if key not in self._gateway_of:
                self._gateway_of[key] = gateway
                gateway.live[key] = gateway.heard_at + LEASE_SECONDS
        return None

    def _lose(self, gateway: _Gateway) -> None:
        self._connected.discard(gateway)
        for key in gateway.live:
            self._abort(key)
        gateway.live.clear()


def _first_tokens_first(rows: list[StreamRow]) -> list[list[StreamRow]]:
    """One list, or two where some of many rows bring a first token. Rows of one request keep their order."""
    first: list[StreamRow] = []
    rest: list[StreamRow] = []
    for row in rows:
        (first if row.usage is not None and row.finish_reason is None else rest).append(row)
    if first and rest and len({row[:2] for row in rows}) == len(rows):
        return [first, rest]
    return [rows]
