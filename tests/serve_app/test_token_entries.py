"""Tokens with their log probabilities, in the shapes of both endpoints, and the prompt before an answer."""

from __future__ import annotations

import json

import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from engine_actor.request import TokenLogprob
from serve_app.api.logprobs import chat_logprobs, completion_logprobs
from serve_app.text.text_stream import TextStream
from serve_app.text.token_entries import PromptEcho, TokenEntry, token_entries, token_text
from serve_app.text.tokenizer import Tokenizer, byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = 258


def entries_of(data: bytes, *, top: int = 1) -> list[TokenEntry]:
    ids = [*data, EOS]
    stream = TextStream(TOKENIZER)
    stream.feed(ids, ends=True)
    logprobs = [TokenLogprob(token, -0.5, tuple((65 + i, -1.0 - i) for i in range(top))) for token in ids]
    return token_entries(TOKENIZER, logprobs, stream.offsets)


def test_a07_chat_shape_and_bytes_that_rebuild_the_text() -> None:
    text = "né 👍"
    body = chat_logprobs(entries_of(text.encode(), top=2))
    parsed = ChoiceLogprobs.model_validate(json.loads(json.dumps(body)), strict=True)
    assert parsed.content is not None and len(parsed.content) == len(text.encode()) + 1
    assert b"".join(bytes(entry.bytes or ()) for entry in parsed.content).decode() == text
    assert [entry.token for entry in parsed.content[:4]] == ["n", "\\xc3", "\\xa9", " "]
    assert (parsed.content[-1].token, parsed.content[-1].bytes) == ("<|im_end|>", [])
    first = parsed.content[0]
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs] == [
        ("A", -1, [65]),
        ("B", -2, [66]),
    ]
    assert chat_logprobs(entries_of(b"a", top=0))["content"][0]["top_logprobs"] == []


def test_completion_shape_offsets_and_names_of_bytes() -> None:
    body = completion_logprobs(entries_of("né!".encode()))
    parsed = Logprobs.model_validate(json.loads(json.dumps(body)), strict=True)
    assert parsed.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"]
    assert parsed.text_offset == [0, 1, 1, 2, 3]
    assert parsed.token_logprobs == [-0.5] * 5
    assert parsed.top_logprobs is not None and parsed.top_logprobs[0] == {"A": -1.0, "n": -0.5}


def test_the_chosen_token_comes_once_among_the_likeliest() -> None:
    entry = TokenLogprob(65, -1.0, ((65, -1.0), (66, -2.0)))
    [top] = completion_logprobs(token_entries(TOKENIZER, [entry], [0]))["top_logprobs"]
    assert top == {"A": -1.0, "B": -2.0}


def test_an_echo_shows_a_text_as_it_came_and_ids_by_their_spelling() -> None:
    ids = TOKENIZER.encode_prompt("né<|im_start|>!")
    for echo in (PromptEcho(TOKENIZER, ids, "né<|im_start|>!"), PromptEcho(TOKENIZER, ids, None)):
        assert echo.text == "né<|im_start|>!"
        body = completion_logprobs(echo.entries([TokenLogprob(token, -2.0, ()) for token in ids[1:]]))
        assert body["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", "<|im_start|>", "!"]
        assert body["text_offset"] == [0, 1, 1, 2, 14]
        assert body["token_logprobs"] == [None, -2.0, -2.0, -2.0, -2.0]
        assert body["top_logprobs"][0] is None


def test_what_a_tokenizer_puts_in_front_is_not_counted() -> None:
    vocab = {"<s>": 0, "▁": 1, "▁h": 2, "i": 3, "h": 4}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "h")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, eos_token_ids=[], bos_token_id=0, add_bos=True)
    ids = tokenizer.encode_prompt("hi")
    assert ids == [0, 2, 3]
    echo = PromptEcho(tokenizer, ids, "hi")
    entries = echo.entries([TokenLogprob(2, -1.0, ()), TokenLogprob(3, -1.0, ())])
    assert echo.text == "hi" and [entry.offset for entry in entries] == [0, 0, 1]


def test_a_token_that_ends_an_answer_counts_and_is_not_shown() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.feed(list(b"ab"), ends=True) == ("a", False)
    assert stream.tokens == 2 and stream.finish() == ""


@pytest.mark.parametrize(
    ("min_tokens", "text", "tokens"), [(0, "x", 4), (3, "x", 4), (4, "xENDy", 8), (9, "xENDyEND", 8)]
)
def test_stop_strings_begin_after_min_tokens(min_tokens: int, text: str, tokens: int) -> None:
    stream = TextStream(TOKENIZER, ["END"], min_tokens)
    shown = "".join(stream.feed([byte])[0] for byte in b"xENDyEND")
    if min_tokens == 3:  # the first three have been shown already
        assert shown == "xENDy" and stream.stopped
        return
    assert (shown, stream.tokens) == (text, tokens)


def test_spellings() -> None:
    assert token_text(TOKENIZER, 0x41).is_text and not token_text(TOKENIZER, 0xE4).is_text
    assert token_text(TOKENIZER, 0xE4).spelling == "\\xe4"
    assert (token_text(TOKENIZER, 257).spelling, token_text(TOKENIZER, 257).data) == ("<|im_start|>", b"")
