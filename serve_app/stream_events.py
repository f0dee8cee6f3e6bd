"""The server-sent events of one streamed answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from serve_app.api.responses import SSE_DONE, ResponseBuilder, Usage, sse
from serve_app.sequence import TextEvent

_TEXT = "\0"
_TEXT_JSON = json.dumps(_TEXT).encode()


class StreamEvents:
    """Turns new text into events, in the order that `ResponseBuilder` asks for.

    Nearly every chunk differs from the one before in its text alone: what stands around it is made once per choice.
    """

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def encode(self, events: Sequence[TextEvent], usage: Callable[[], Usage]) -> bytes:
        """The events of a step's new text; `usage` is asked where every chunk carries it."""
        parts: list[bytes] = []
        for event in events:
            around = self._around.get(event.index)
            if around is None:
                around = self._around[event.index] = self._halves(event.index)
                first = self._builder.first(event.index)
                if first is not None:
                    parts.append(self._event(first, usage))
            if event.entries or (event.text and self._builder.continuous_usage):
                parts.append(self._event(self._builder.delta(event.index, event.text, event.entries), usage))
            elif event.text:
                parts += (around[0], json.dumps(event.text).encode(), around[1])
            if event.finish_reason is not None:
                parts.append(self._event(self._builder.finish(event.index, event.finish_reason), usage))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """What follows the last chunk of the last choice."""
        tail = sse(self._builder.usage_chunk(usage)) if self._builder.include_usage else b""
        return tail + SSE_DONE

    def _event(self, chunk: dict[str, Any], usage: Callable[[], Usage]) -> bytes:
        if self._builder.continuous_usage:
            chunk = {**chunk, "usage": usage().to_dict()}
        return sse(chunk)

    def _halves(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = sse(self._builder.delta(index, _TEXT)).rpartition(_TEXT_JSON)
        return before, after
