"""The text side of one served model: tokenizer, chat template, end tokens and context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_actor.loading.read_config import read_model_config
from engine_actor.loading.source import resolve_source
from engine_actor.request import TokenLogprob
from serve_app.api.errors import invalid_request
from serve_app.text.chat_template import ChatTemplate
from serve_app.text.load import load_tokenizer
from serve_app.text.text_stream import TextStream
from serve_app.text.token_entries import PromptEcho, TokenEntry, token_entries
from serve_app.text.tokenizer import Tokenizer, byte_tokenizer


class ModelText:
    """Everything a gateway needs to turn text into token ids and back.

    `eos_token_ids` holds every end token of model and tokenizer, `context_length` is the model's own, in tokens.
    `vocab_size` is the model's: a tokenizer may know tokens beyond it, which must not reach an engine.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_length: int,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        tokenizer.prepare()
        self._tokenizer = tokenizer
        self._template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.context_length = context_length
        ends = {*eos_token_ids, *tokenizer.eos_token_ids}
        self.eos_token_ids = tuple(sorted(token for token in ends if token < self._vocab_size))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation through the model's template. Raises ApiError 400."""
        if self._template is None:
            raise invalid_request("This model has no chat template: use /v1/completions.", "messages")
        return self._known(self._template.encode(messages), "messages")

    def encode_prompt(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of a completion prompt, with the BOS that the model wants unless it is not to be added. Raises ApiError
        400 for control tokens that the model does not have."""
        ids = self._tokenizer.encode_prompt(text) if add_bos else self._tokenizer.encode_control(text)
        return self._known(ids, "prompt")

    def check_ids(self, ids: list[int], field: str = "prompt") -> list[int]:
        """Token ids given by a client, as they are. Raises ApiError 400 for one the vocabulary does not have."""
        for token in ids:
            if not self._tokenizer.id_in_vocab(token):
                raise invalid_request(f"{field}: {token} is not a token of this model.", field)
        return self._known(ids, field)

    def _known(self, ids: list[int], field: str) -> list[int]:
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise invalid_request(f"{field}: {highest} is not a token of this model.", field)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; control tokens have none."""
        return self._tokenizer.decode(ids)

    def stream(self, stop: Sequence[str], min_tokens: int = 0) -> TextStream:
        """A fresh detokeniser for one choice."""
        return TextStream(self._tokenizer, stop, min_tokens)

    def entries(self, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> list[TokenEntry]:
        """Log probabilities with the text of their tokens."""
        return token_entries(self._tokenizer, logprobs, offsets)

    def echo(self, prompt: Sequence[int], text: str | None) -> PromptEcho:
        """A prompt to show before an answer; `text` is None where it came as token ids."""
        return PromptEcho(self._tokenizer, prompt, text)


def load_model_text(source: str, revision: str | None) -> ModelText:
    """The text side of a model source. Raises LoadError."""
    resolved = resolve_source(source, revision)
    config = read_model_config(resolved)
    return ModelText(
        load_tokenizer(resolved), config.max_position_embeddings, config.eos_token_ids, config.vocab_size
    )


def stub_model_text(context_length: int) -> ModelText:
    """Bytes for tokens: the text side of the stub engine."""
    return ModelText(byte_tokenizer(), context_length)
