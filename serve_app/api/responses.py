"""Response bodies of the OpenAI API: chat.completion, text_completion, their chunks, and the model list.

Both endpoints offer the same builder methods: the code that serves a request need not ask which one it is.
Field names and shapes follow https://platform.openai.com/docs/api-reference (chat/object, chat/streaming,
completions/object, models/list).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.api.logprobs import chat_logprobs, completion_logprobs
from serve_app.text.token_entries import TokenEntry

ApiFinishReason = Literal["stop", "length"]

SSE_DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII only: some clients also break lines at U+2028, U+0085 and the like."""
    return b"data: " + json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"


@dataclass(frozen=True)
class Usage:
    """Tokens of one call: each prompt once, all choices. `cached_tokens` are among the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Choice:
    """One finished sequence. With n choices for each prompt the index is prompt * n + choice.

    `entries` are its tokens with their log probabilities, None where those are not wanted.
    """

    index: int
    text: str
    finish_reason: ApiFinishReason
    entries: Sequence[TokenEntry] | None = None


@dataclass(frozen=True)
class ResponseBuilder(ABC):
    """Bodies of one call. `created` is in Unix seconds; `model` is the name the caller used.

    Stream order: `first` and any number of `delta` per choice, `finish` per choice, then, only with
    `include_usage`, one `usage_chunk`, then SSE_DONE. The chunks before it carry `usage: null` with
    `include_usage`, and no `usage` without.
    """

    id: str
    created: int
    model: str
    include_usage: bool = False
    continuous_usage: bool = False
    """The caller of these methods puts the usage so far into every chunk."""

    @abstractmethod
    def full(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The whole answer of a call that does not stream."""

    @abstractmethod
    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a choice, None where the endpoint has no such chunk."""

    @abstractmethod
    def delta(self, index: int, text: str, entries: Sequence[TokenEntry] | None = None) -> dict[str, Any]:
        """New text of a choice, maybe none, and its new tokens where log probabilities are wanted."""

    @abstractmethod
    def finish(self, index: int, reason: ApiFinishReason) -> dict[str, Any]:
        """The last chunk of a choice."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk after all choices have finished."""

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        body = self._body(kind, choices)
        if self.include_usage:
            body["usage"] = usage.to_dict() if usage else None
        return body


class ChatResponses(ResponseBuilder):
    """POST /v1/chat/completions. Ids begin with `chatcmpl-`."""

    def full(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        body = self._body(
            "chat.completion",
            [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None if choice.entries is None else chat_logprobs(choice.entries),
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
        )
        return {**body, "usage": usage.to_dict()}

    def first(self, index: int) -> dict[str, Any]:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, text: str, entries: Sequence[TokenEntry] | None = None) -> dict[str, Any]:
        return self._delta(index, {"content": text}, None, entries)

    def finish(self, index: int, reason: ApiFinishReason) -> dict[str, Any]:
        return self._delta(index, {}, reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk("chat.completion.chunk", [], usage)

    def _delta(
        self,
        index: int,
        delta: dict[str, str],
        reason: ApiFinishReason | None,
        entries: Sequence[TokenEntry] | None = None,
    ) -> dict[str, Any]:
        logprobs = None if entries is None else chat_logprobs(entries)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk("chat.completion.chunk", [choice])


class CompletionResponses(ResponseBuilder):
    """POST /v1/completions. Ids begin with `cmpl-`; chunks have the shape of the whole."""

    def full(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        body = self._body(
            "text_completion",
            [
                _text_choice(choice.index, choice.text, choice.finish_reason, choice.entries)
                for choice in choices
            ],
        )
        return {**body, "usage": usage.to_dict()}

    def first(self, index: int) -> None:
        return None

    def delta(self, index: int, text: str, entries: Sequence[TokenEntry] | None = None) -> dict[str, Any]:
        return self._chunk("text_completion", [_text_choice(index, text, None, entries)])

    def finish(self, index: int, reason: ApiFinishReason) -> dict[str, Any]:
        return self._chunk("text_completion", [_text_choice(index, "", reason)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk("text_completion", [], usage)


def _text_choice(
    index: int, text: str, reason: ApiFinishReason | None, entries: Sequence[TokenEntry] | None = None
) -> dict[str, Any]:
    logprobs = None if entries is None else completion_logprobs(entries)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(frozen=True)
class ModelCard:
    """One row of GET /v1/models: a served name or alias. `max_model_len` is the context length in tokens."""

    id: str
    created: int
    max_model_len: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "evenhand",
            "max_model_len": self.max_model_len,
        }


def model_list(models: Iterable[ModelCard]) -> dict[str, Any]:
    """GET /v1/models."""
    return {"object": "list", "data": [model.to_dict() for model in models]}
