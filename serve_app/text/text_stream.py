"""From the ids an engine sends to the text a client gets: detokenise, look for stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_app.text.detokenizer import Detokenizer
from serve_app.text.stop_strings import StopChecker
from serve_app.text.tokenizer import Tokenizer


class TextStream:
    """The text of one sequence. Streaming or not, the same ids give the same text, however they are batched.

    `tokens` counts the ids up to the one that completed a stop string: what came after it was generated in
    vain.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._checker = StopChecker(stop)
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._checker.matched is not None

    def feed(self, token_ids: Iterable[int]) -> tuple[str, bool]:
        """New text that can be sent, and whether a stop string has ended the sequence."""
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            pieces.append(self._checker.feed(self._detokenizer.feed(token_id)))
        return "".join(pieces), self.stopped

    def finish(self) -> str:
        """The rest of the text; empty after a stop string. May itself complete one, so ask `stopped`
        afterwards."""
        return self._checker.feed(self._detokenizer.finish()) + self._checker.finish()
