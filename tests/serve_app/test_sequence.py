"""What the rows of one choice become: text, log probabilities, echo, ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_actor.request import RequestUsage, SamplingParams, StreamRow, TokenLogprob
from serve_app.api.endpoints import ParsedRequest
from serve_app.api.logprobs import completion_logprobs
from serve_app.api.responses import CompletionResponses
from serve_app.sequence import Sequence
from serve_app.text.model_text import stub_model_text

TEXT = stub_model_text(100)
PROMPT = list(b"hi ")


def sequence(
    index: int = 0, *, n: int = 1, echo: bool = False, stop: tuple[str, ...] = (), **params: Any
) -> Sequence:
    sampling = SamplingParams(20, **params)
    echoes = [TEXT.echo(PROMPT, None)] if echo else None
    builder = CompletionResponses("cmpl-1", 0, "m")
    return Sequence(
        index, ParsedRequest([PROMPT], sampling, list(stop), n, False, builder, echoes=echoes), TEXT
    )


def row(data: bytes = b"", reason: Any = None, **fields: Any) -> StreamRow:
    logprobs = tuple(TokenLogprob(token, -1.0) for token in data)
    return StreamRow("r/0", 1, tuple(data), reason, logprobs=logprobs, **fields)


def test_text_and_its_end() -> None:
    choice = sequence()
    events = [choice.take(one) for one in (row(b"a"), row(b"\xc3"), row(b"\xa9"), row(b"b", "length"))]
    assert [event and (event.text, event.finish_reason) for event in events] == [
        ("a", None),
        None,
        ("é", None),
        ("b", "length"),
    ]
    assert (choice.choice().text, choice.choice().entries, choice.output_tokens) == ("aéb", None, 4)


def test_a_token_that_stops_is_counted_and_not_shown() -> None:
    choice = sequence()
    event = choice.take(row(b"x", "stop"))
    assert event is not None and (event.text, event.finish_reason, choice.output_tokens) == ("", "stop", 1)


def test_a_stop_string_ends_the_choice_before_the_engine_does() -> None:
    choice = sequence(stop=("ab",), logprobs=0)
    assert choice.take(row(b"a")) is not None  # its entry, while the text waits
    event = choice.take(row(b"bc"))
    assert event is not None and (event.text, event.finish_reason) == ("", "stop") and choice.stopped
    assert len(choice.choice().entries or ()) == choice.output_tokens == 2


def test_the_echo_comes_once_before_the_first_text_with_the_prompt_s_entries() -> None:
    choice = sequence(echo=True, logprobs=0, prompt_logprobs=0)
    scored = tuple(TokenLogprob(token, -2.0) for token in PROMPT[1:])
    assert choice.take(row(prompt_logprobs=scored[:1])) is None
    first = choice.take(row(b"y", prompt_logprobs=scored[1:]))
    last = choice.take(row(b"o", "length"))
    assert first is not None and last is not None and (first.text, last.text) == ("hi y", "o")
    body = completion_logprobs(choice.choice().entries or ())
    assert body["tokens"] == ["h", "i", " ", "y", "o"] and body["text_offset"] == [0, 1, 2, 3, 4]
    assert body["token_logprobs"] == [None, -2.0, -2.0, -1.0, -1.0]


def test_an_echo_without_an_answer() -> None:
    choice = sequence(echo=True)
    event = choice.take(row(reason="length", usage=RequestUsage(3, 0, 0)))
    assert event is not None and (event.text, event.finish_reason) == ("hi ", "length")
    assert choice.output_tokens == 0


def test_a_lost_run_leaves_nothing_behind() -> None:
    choice = sequence(echo=True, logprobs=0, prompt_logprobs=0)
    scored = tuple(TokenLogprob(token, -2.0) for token in PROMPT[1:])
    choice.take(row(b"\xc3", prompt_logprobs=scored))
    choice.restart()
    choice.take(row(b"z", "length", prompt_logprobs=scored))
    assert choice.choice().text == "hi z" and len(choice.choice().entries or ()) == 4


def test_each_choice_of_a_prompt_has_its_seed() -> None:
    params = SamplingParams(20, seed=5)
    assert [sequence(i, n=3).sampling(params).seed for i in range(3)] == [5, 6, 7]
    assert sequence(1, n=3).sampling(replace(params, seed=None)).seed is None
