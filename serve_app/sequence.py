"""One choice of an answer: what its rows from the engine become."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_actor.request import RequestUsage, SamplingParams, StreamRow, TokenLogprob
from serve_app.api.endpoints import ParsedRequest
from serve_app.api.responses import ApiFinishReason, Choice
from serve_app.text.model_text import ModelText
from serve_app.text.token_entries import PromptEcho, TokenEntry


@dataclass(frozen=True)
class TextEvent:
    """New text of one choice after one step; `finish_reason` with its last. `entries` are its new tokens, None where
    log probabilities are not wanted."""

    index: int
    text: str
    finish_reason: ApiFinishReason | None
    entries: list[TokenEntry] | None


class Sequence:
    """Choice `index` of a request: its prompt, and what has come of it so far. With n choices for each prompt the index
    is prompt * n + choice."""

    def __init__(self, index: int, parsed: ParsedRequest, text: ModelText) -> None:
        self.index = index
        self.prompt = parsed.prompts[index // parsed.n]
        self._parsed = parsed
        self._model_text = text
        self.restart()

    def restart(self) -> None:
        """Begin, or forget a run that was lost: its tokens were never sent."""
        sampling, echoes = self._parsed.sampling, self._parsed.echoes
        self._stream = self._model_text.stream(self._parsed.stop, sampling.min_tokens)
        self._echo: PromptEcho | None = None if echoes is None else echoes[self.index // self._parsed.n]
        self._echoed = self._echo is None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._entries: list[TokenEntry] | None = None if sampling.logprobs is None else []
        self.usage = RequestUsage()
        self.finish_reason: ApiFinishReason | None = None

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """The request's parameters for this choice: with a seed given, each choice of a prompt has its own."""
        if params.seed is None:
            return params
        seed = (params.seed + self.index % self._parsed.n) % 2**64  # as in the engine: 64 bits
        return replace(params, seed=seed)

    @property
    def output_tokens(self) -> int:
        """Tokens generated, those after a stop string excepted."""
        return self._stream.tokens

    @property
    def stopped(self) -> bool:
        """A stop string was found: what the engine still makes is in vain."""
        return self._stream.stopped

    def choice(self) -> Choice:
        """The whole choice, once it has ended."""
        return Choice(self.index, "".join(self._text), self.finish_reason or "stop", self._entries)

    def count(self, row: StreamRow) -> None:
        """Take a row's tokens and usage for the account alone."""
        self._stream.feed(row.token_ids)
        self.usage = row.usage or self.usage

    def take(self, row: StreamRow) -> TextEvent | None:
        """The text of a row that is neither an error nor an abort; None where it brings nothing to show."""
        self._prompt_logprobs += row.prompt_logprobs
        if not row.token_ids and row.finish_reason is None:
            return None
        known = self._stream.tokens
        text, stopped = self._stream.feed(row.token_ids, ends=row.finish_reason == "stop")
        entries = self._new_entries(row, known)
        if self._echo is not None and not self._echoed:
            text, self._echoed = self._echo.text + text, True
        if row.finish_reason is not None and not stopped:
            text += self._stream.finish()
        if row.finish_reason is not None or stopped:
            length = row.finish_reason == "length" and not self._stream.stopped
            self.finish_reason = "length" if length else "stop"
        if text:
            self._text.append(text)
        if not (text or entries or self.finish_reason):
            return None
        return TextEvent(self.index, text, self.finish_reason, entries)

    def _new_entries(self, row: StreamRow, known: int) -> list[TokenEntry] | None:
        """Entries of the tokens taken since `known` were; before the first ones those of an echoed prompt."""
        if self._entries is None:
            return None
        shift = 0 if self._echo is None else len(self._echo.text)
        offsets = [shift + offset for offset in self._stream.offsets[known:]]
        entries = self._model_text.entries(row.logprobs, offsets)
        if self._echo is not None and not self._echoed:
            entries = self._echo.entries(self._prompt_logprobs) + entries
        self._entries += entries
        return entries
