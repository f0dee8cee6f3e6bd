"""From the ids an engine sends to the text a client gets: detokenise, look for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.text.detokenizer import Detokenizer
from serve_app.text.stop_strings import StopChecker
from serve_app.text.tokenizer import Tokenizer


class TextStream:
    """The text of one sequence. Streaming or not, the same ids give the same text, however they are batched.

    The text of the first `min_tokens` tokens is not searched for stop strings. `offsets` has an entry per id up to the
    one that completed a stop string, what came after it was generated in vain: the characters complete before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._checker = StopChecker(stop)
        self._searches = bool(stop)
        self._min_tokens = min_tokens
        self._characters = 0
        self.offsets: list[int] = []

    @property
    def tokens(self) -> int:
        """Ids taken so far."""
        return len(self.offsets)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._checker.matched is not None

    def feed(self, token_ids: Sequence[int], *, ends: bool = False) -> tuple[str, bool]:
        """New text that can be sent, and whether a stop string has ended the sequence.

        `ends`: the last id is the one that ended the generation; it counts, and its text is not shown.
        """
        if self.stopped:
            return "", True
        pieces = []
        checker = self._checker if self._searches else None
        last = len(token_ids) - 1 if ends else None
        for index, token_id in enumerate(token_ids):
            self.offsets.append(self._characters)
            if index == last:
                break
            text = self._detokenizer.feed(token_id)
            self._characters += len(text)
            if checker is not None and len(self.offsets) > self._min_tokens:
                text = checker.feed(text)
                if checker.matched is not None:
                    pieces.append(text)
                    break
            pieces.append(text)
        return "".join(pieces), self.stopped

    def finish(self) -> str:
        """The rest of the text; empty after a stop string. May itself complete one, so ask `stopped`
        afterwards."""
        return self._checker.feed(self._detokenizer.finish()) + self._checker.finish()
