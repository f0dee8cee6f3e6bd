from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serve_app.api.responses import (
    SSE_DONE,
    ChatResponses,
    Choice,
    CompletionResponses,
    ModelCard,
    ResponseBuilder,
    Usage,
    model_list,
    sse,
)

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
CHOICES = [Choice(0, "Paris", "stop"), Choice(1, "Par\u2028is 👍", "length")]


def client(content: bytes, kind: str) -> openai.OpenAI:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=content, headers={"content-type": kind})

    return openai.OpenAI(
        api_key="k",
        base_url="http://test/v1",
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
    )


def stream(builder: ResponseBuilder) -> bytes:
    chunks: list[dict[str, Any]] = []
    for choice in CHOICES:
        first = builder.first(choice.index)
        chunks += [first] if first else []
        chunks += [builder.delta(choice.index, choice.text[:3]), builder.delta(choice.index, choice.text[3:])]
        chunks.append(builder.finish(choice.index, choice.finish_reason))
    if builder.include_usage:
        chunks.append(builder.usage_chunk(USAGE))
    return b"".join(map(sse, chunks)) + SSE_DONE


def test_chat_completion() -> None:
    body = ChatResponses("chatcmpl-1", 1700000000, "m").full(CHOICES, USAGE)
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert parsed.object == "chat.completion" and parsed.choices[1].message.content == CHOICES[1].text
    assert [choice.finish_reason for choice in parsed.choices] == ["stop", "length"]
    assert parsed.usage is not None and parsed.usage.total_tokens == 12
    assert (
        parsed.usage.prompt_tokens_details is not None
        and parsed.usage.prompt_tokens_details.cached_tokens == 4
    )


def test_text_completion() -> None:
    body = CompletionResponses("cmpl-1", 1700000000, "m").full(CHOICES, USAGE)
    parsed = Completion.model_validate(body, strict=True)
    assert [choice.text for choice in parsed.choices] == [choice.text for choice in CHOICES]
    assert [choice.index for choice in parsed.choices] == [0, 1]
    assert parsed.usage is not None and parsed.usage.completion_tokens == 5


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream(include_usage: bool) -> None:
    content = stream(ChatResponses("chatcmpl-1", 1700000000, "m", include_usage))
    api = client(content, "text/event-stream")
    chunks = list(
        api.chat.completions.create(model="m", messages=[{"role": "user", "content": ""}], stream=True)
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.text for choice in CHOICES}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage is not None for c in chunks] == [False] * 8 + [True] * include_usage


@pytest.mark.parametrize("include_usage", [False, True])
def test_completion_stream(include_usage: bool) -> None:
    content = stream(CompletionResponses("cmpl-1", 1700000000, "m", include_usage))
    chunks = list(client(content, "text/event-stream").completions.create(model="m", prompt="", stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in CHOICES}
    assert [c.usage is not None for c in chunks] == [False] * 6 + [True] * include_usage


@pytest.mark.parametrize("kind", [ChatResponses, CompletionResponses])
def test_the_usage_rule_on_the_wire(kind: type[ResponseBuilder]) -> None:
    def events(include_usage: bool) -> list[dict[str, Any]]:
        lines = stream(kind("id", 1, "m", include_usage)).split(b"\n\n")
        assert lines[-2:] == [b"data: [DONE]", b""]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]

    *chunks, last = events(True)
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 12
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in chunk for chunk in events(False))


def test_an_event_is_one_line_for_every_client() -> None:
    event = sse({"text": "a\nb\r\u2028\u0085\x0b"})
    assert event.endswith(b"\n\n") and len(event.decode().splitlines()) == 2
    assert json.loads(event[6:]) == {"text": "a\nb\r\u2028\u0085\x0b"}
    with pytest.raises(ValueError, match="JSON"):
        sse({"value": float("nan")})


def test_model_list() -> None:
    body = model_list([ModelCard("a", 1700000000, 8192), ModelCard("b", 1700000000, 8192)])
    api = client(json.dumps(body).encode(), "application/json")
    assert [model.id for model in api.models.list()] == ["a", "b"]
    Model.model_validate(body["data"][0], strict=True)
