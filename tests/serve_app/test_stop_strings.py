from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.stop_strings import StopChecker
from serve_app.text.text_stream import TextStream
from serve_app.text.tokenizer import byte_tokenizer


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    checker = StopChecker(stops)
    shown = [checker.feed(piece) for piece in pieces]
    return [*shown, checker.finish()], checker.matched


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first prefix of the text that ends with a stop string; the longest of those is cut off."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=1000, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
)
def test_any_text_any_cut_any_stops(pieces: list[str], stops: list[str]) -> None:
    shown, matched = run(pieces, stops)
    assert ("".join(shown), matched) == by_definition("".join(pieces), stops)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_only_what_may_begin_a_stop_is_held(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += checker.feed(char)
        if checker.matched is not None:
            return
        held = text[len(shown) : end]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_a_stop_over_many_tokens_is_never_partly_shown() -> None:
    assert run(list("one END."), ["END"]) == ([*"one ", "", "", "", "", ""], "END")


def test_a_false_start_is_released_in_full() -> None:
    shown, matched = run(["x EN", "D of", " EN"], ["ENDING"])
    assert (shown, matched) == (["x ", "END of", " ", "EN"], None)


def test_overlapping_stops() -> None:
    assert run(["aabc"], ["abc", "b"]) == (["aa", ""], "b")  # b ends first
    assert run(["xabc"], ["c", "abc", "bc"]) == (["x", ""], "abc")  # all end together: the longest
    assert run(["aab"], ["aab", "ab"]) == (["", ""], "aab")
    assert run(["a", "a", "a", "b"], ["aab"]) == (["", "", "a", "", ""], "aab")


def test_nothing_comes_after_a_match() -> None:
    shown, _ = run(["aX", "more", "X"], ["X"])
    assert shown == ["a", "", "", ""]


def test_without_stops_text_passes() -> None:
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_an_empty_stop_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])


def text_stream(data: bytes, stop: list[str], batch: int) -> tuple[str, bool, int]:
    stream = TextStream(byte_tokenizer(), stop)
    ids = list(data)
    text = ""
    for begin in range(0, len(ids), batch):
        new, stopped = stream.feed(ids[begin : begin + batch])
        text += new
        if stopped:
            break
    return text + stream.finish(), stream.stopped, stream.tokens


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 100])
def test_streams_do_not_depend_on_batching(batch: int) -> None:
    data = "naïve 👍 stop here".encode()
    assert text_stream(data, ["👍 st"], batch) == ("naïve ", True, len("naïve 👍 st".encode()))
    assert text_stream(data, ["here!"], batch) == ("naïve 👍 stop here", False, len(data))
    assert text_stream(data, ["here"], batch) == ("naïve 👍 stop ", True, len(data))  # at the last token
    assert text_stream(data[:9], [], batch) == ("naïve \ufffd", False, 9)


def test_the_last_flush_may_complete_a_stop() -> None:
    assert text_stream(b"ab\xf0", ["b\ufffd"], 1) == ("a", True, 3)
