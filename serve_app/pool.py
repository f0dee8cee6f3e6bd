"""One served model as a gateway sees it: its names, its text side, its fair queue and its engines."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from policies.tickets import Grant, Refusal, Ticket
from serve_app.channel import EngineChannel
from serve_app.output_lengths import SharedOutputLengths
from serve_app.queue_client import QueueClient, QueueLostError
from serve_app.text.model_text import ModelText

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
        self.queue = QueueClient(queue, gateway, self.output_lengths)
        self._highest_epoch = 0

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens: the smallest of the connected engines."""
        lengths = [c.description.max_model_len for c in self.channels.values() if c.description is not None]
        return min(lengths, default=self.text.context_length)

    @property
    def ready(self) -> bool:
        """An engine can serve now, and a fair queue lets requests in."""
        return self.queue.snapshot is not None and any(
            channel.description is not None for channel in self.channels.values()
        )

    async def ask_for_entry(self, ticket: Ticket, asked_at: float, timeout_seconds: float) -> Grant | Refusal:
        """Wait for a grant or a refusal, through deaths of the fair queue: the ticket keeps its age.

        `asked_at` is the monotonic time the request first asked. Raises QueueGoneError after `timeout_seconds`.
        """
        while time.monotonic() - asked_at < timeout_seconds:
            aged = _aged(ticket, (time.monotonic() - asked_at) * 1e3)
            try:
                answer = await self.queue.ask(aged)
                if isinstance(answer, Refusal) or answer.queue_epoch >= self._highest_epoch:
                    if isinstance(answer, Grant):
                        self._highest_epoch = answer.queue_epoch
                    return answer
            except QueueLostError:
                pass
            await asyncio.sleep(_RETRY_SECONDS)
        raise QueueGoneError

    def stop(self) -> None:
        self.queue.stop()
        for channel in self.channels.values():
            channel.stop()


def _aged(ticket: Ticket, age_ms: float) -> Ticket:
    """The ticket of a request that first asked `age_ms` ago."""
    ttft, deadline = ticket.remaining_ttft_ms, ticket.remaining_deadline_ms
    return replace(
        ticket,
        age_ms=age_ms,
        remaining_ttft_ms=None if ttft is None else ttft - age_ms,
        remaining_deadline_ms=None if deadline is None else deadline - age_ms,
    )
