"""Events put together from halves are those of the response builder, byte for byte."""

from __future__ import annotations

import pytest

from serve_app.api.responses import (
    SSE_DONE,
    ChatResponses,
    CompletionResponses,
    ResponseBuilder,
    Usage,
    sse,
)
from serve_app.sequence import TextEvent
from serve_app.stream_events import StreamEvents
from serve_app.text.token_entries import TokenEntry, TokenText

USAGE = Usage(3, 2)
TEXTS = ['a "quoted" \\ one', "\0", "\u2028 \x85 é 👍", "\ud83d", '"text":""', "\\u0000"]
ENTRY = TokenEntry(TokenText("a", b"a"), -0.5, (), 0)


def builders() -> list[ResponseBuilder]:
    return [
        kind("id-1", 1_700_000_000, "m\0odel", usage, continuous)
        for kind in (ChatResponses, CompletionResponses)
        for usage, continuous in ((False, False), (True, False), (True, True))
    ]


@pytest.mark.parametrize("builder", builders())
def test_events_are_those_of_the_builder(builder: ResponseBuilder) -> None:
    stream = StreamEvents(builder)
    sent = b"".join(
        stream.encode([TextEvent(0, text, None, None), TextEvent(1, text, None, None)], lambda: USAGE)
        for text in TEXTS
    )
    sent += stream.encode([TextEvent(0, "", "stop", None), TextEvent(1, "z", "length", None)], lambda: USAGE)
    chunks = [chunk for index in (0, 1) if (chunk := builder.first(index)) is not None]
    deltas = [builder.delta(index, text) for text in TEXTS for index in (0, 1)]
    if chunks:  # each choice opens with its own first text
        deltas[:2] = [chunks[0], deltas[0], chunks[1], deltas[1]]
    ends = [builder.finish(0, "stop"), builder.delta(1, "z"), builder.finish(1, "length")]
    wanted = deltas + ends
    if builder.continuous_usage:
        wanted = [{**chunk, "usage": USAGE.to_dict()} for chunk in wanted]
    assert sent == b"".join(map(sse, wanted))
    last = sse(builder.usage_chunk(USAGE)) if builder.include_usage else b""
    assert stream.end(USAGE) == last + SSE_DONE


def test_log_probabilities_come_with_their_text() -> None:
    builder = CompletionResponses("id-1", 0, "m")
    stream = StreamEvents(builder)
    for text in ("a", ""):
        assert stream.encode([TextEvent(0, text, None, [ENTRY])], lambda: USAGE) == sse(
            builder.delta(0, text, [ENTRY])
        )
