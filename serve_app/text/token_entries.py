"""Log probabilities with the text of their tokens, as both endpoints report them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_actor.request import TokenLogprob
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenText:
    """A token as it is shown: `data` is what it adds to the text, in UTF-8, maybe a part of a character.

    `spelling` is the same where that is text; control tokens add nothing and are spelled all the same.
    """

    spelling: str
    data: bytes

    @property
    def is_text(self) -> bool:
        """Whether the bytes are whole characters."""
        try:
            self.data.decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True


@dataclass(frozen=True)
class TokenEntry:
    """One token of an answer. `logprob` is None for a first token, which follows nothing.

    `offset` counts the characters of the answer's text that are complete before it.
    """

    token: TokenText
    logprob: float | None
    top: tuple[tuple[TokenText, float], ...]
    offset: int


def token_text(tokenizer: Tokenizer, token_id: int) -> TokenText:
    """How a token is shown. Bytes that are no characters are spelled as escapes."""
    data = tokenizer.token_bytes(token_id)
    spelling = tokenizer.control_spelling(token_id)
    return TokenText(data.decode("utf-8", errors="backslashreplace") if spelling is None else spelling, data)


def token_entries(
    tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob], offsets: Sequence[int]
) -> list[TokenEntry]:
    """Entries for tokens with the given offsets; further log probabilities are dropped."""
    return [
        TokenEntry(
            token_text(tokenizer, entry.token_id),
            entry.logprob,
            tuple((token_text(tokenizer, token), logprob) for token, logprob in entry.top),
            offset,
        )
        for entry, offset in zip(logprobs, offsets, strict=False)
    ]


class PromptEcho:
    """The prompt as text in front of an answer.

    A prompt that came as text is shown as it came; one of token ids by the spelling of its tokens, control tokens
    included.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], text: str | None) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        detokenizer = Detokenizer(tokenizer)
        pieces = [tokenizer.control_spelling(token) or detokenizer.feed(token) for token in prompt]
        spelled = "".join(pieces) + detokenizer.finish()
        self.text = spelled if text is None else text
        # Tokenisers add a BOS or a space of their own in front; and some normalise, so that lengths differ.
        added = max(0, len(spelled) - len(self.text))
        ends = [0]
        for piece in pieces[:-1]:
            ends.append(ends[-1] + len(piece))
        self._offsets = [min(max(0, end - added), len(self.text)) for end in ends]

    def entries(self, logprobs: Sequence[TokenLogprob]) -> list[TokenEntry]:
        """Entries of the prompt, from its log probabilities beginning with the second token."""
        first = TokenEntry(token_text(self._tokenizer, self._prompt[0]), None, (), 0)
        return [first, *token_entries(self._tokenizer, logprobs, self._offsets[1:])]
