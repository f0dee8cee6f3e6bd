"""Token ids to text as they come.

Works on the bytes of each token with an incremental UTF-8 decoder: linear, never goes back, holds only the
bytes of an incomplete character, and the pieces joined are exactly `Tokenizer.decode` of the whole.
"""

from __future__ import annotations

import codecs

from serve_app.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence of generated ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly none."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD when the sequence ended inside a character."""
        return self._decoder.decode(b"", True)
