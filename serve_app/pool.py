"""One served model as a gateway sees it: its names, its text side, its fair queue and its engines."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray

from policies.guardrails import ProtectionLines
from policies.tickets import Grant, Refusal, Ticket
from serve_app.channel import EngineChannel
from serve_app.fair_queue import QueueSnapshot
from serve_app.output_lengths import SharedOutputLengths
from serve_app.owner import find_actor
from serve_app.text.model_text import ModelText
from serve_app.within import within

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_RETRY_SECONDS = 0.2


class QueueGoneError(RuntimeError):
    """No fair queue answered in time."""


class ModelPool:
    """A base model with the engines behind it. Aliases are names of the same pool."""

    def __init__(
        self,
        model: str,
        aliases: tuple[str, ...],
        text: ModelText,
        queue: str,
        engines: tuple[str, ...],
        gateway: str,
    ) -> None:
        self.model = model
        self.names = (model, *aliases)
        self.text = text
        self.output_lengths = SharedOutputLengths()
        self.channels = {name: EngineChannel(name, gateway) for name in engines}
        self.queue_snapshot: QueueSnapshot | None = None
        self.protection_lines = ProtectionLines()
        self._queue_name = queue
        self._gateway = gateway
        self._queue: Any = None
        self._highest_epoch = 0
        self._watch = asyncio.create_task(self._watch_queue())

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens: the smallest of the connected engines."""
        lengths = [c.description.max_model_len for c in self.channels.values() if c.description is not None]
        return min(lengths, default=self.text.context_length)

    @property
    def ready(self) -> bool:
        """An engine can serve now, and a fair queue lets requests in."""
        return self.queue_snapshot is not None and any(
            channel.description is not None for channel in self.channels.values()
        )

    async def ask_for_entry(self, ticket: Ticket, asked_at: float, timeout_seconds: float) -> Grant | Refusal:
        """Wait for a grant or a refusal, through deaths of the fair queue: the ticket keeps its age.

        `asked_at` is the monotonic time the request first asked. Raises QueueGoneError after `timeout_seconds`.
        """
        while time.monotonic() - asked_at < timeout_seconds:
            aged = _aged(ticket, (time.monotonic() - asked_at) * 1e3)
            try:
                queue = self._queue_handle()
                if queue is not None:
                    answer: Grant | Refusal = await queue.enqueue.remote(aged, self._gateway)
                    if isinstance(answer, Refusal) or answer.queue_epoch >= self._highest_epoch:
                        if isinstance(answer, Grant):
                            self._highest_epoch = answer.queue_epoch
                        return answer
            except ray.exceptions.RayError as error:
                logger.warning("the fair queue of %s did not answer: %s", self.model, type(error).__name__)
                self._queue = None
            await asyncio.sleep(_RETRY_SECONDS)
        raise QueueGoneError

    def withdraw(self, ticket: Ticket) -> None:
        """The ticket is no longer wanted. Does not wait."""
        if self._queue is not None:
            self._queue.withdraw.remote(ticket.request, ticket.attempt)

    def stop(self) -> None:
        self._watch.cancel()
        for channel in self.channels.values():
            channel.stop()

    def _queue_handle(self) -> Any:
        if self._queue is None:
            self._queue = find_actor(self._queue_name)
        return self._queue

    async def _watch_queue(self) -> None:
        while True:
            queue = self._queue_handle()
            if queue is None:
                self.queue_snapshot = None
            else:
                lengths = self.output_lengths.take_untold()
                try:
                    asked = queue.snapshot.remote(self._gateway, self.protection_lines, lengths)
                    snapshot: QueueSnapshot = await within(2.0, asked)
                    self.output_lengths.learn(snapshot.output_lengths)
                    self.queue_snapshot = snapshot
                except (ray.exceptions.RayError, asyncio.TimeoutError):
                    self._queue, self.queue_snapshot = None, None
                    self.output_lengths.put_back(lengths)
            await asyncio.sleep(_WATCH_SECONDS)


def _aged(ticket: Ticket, age_ms: float) -> Ticket:
    """The ticket of a request that first asked `age_ms` ago."""
    ttft, deadline = ticket.remaining_ttft_ms, ticket.remaining_deadline_ms
    return replace(
        ticket,
        age_ms=age_ms,
        remaining_ttft_ms=None if ttft is None else ttft - age_ms,
        remaining_deadline_ms=None if deadline is None else deadline - age_ms,
    )
