"""POST /tokenize and /detokenize: a model's tokens for a text or a conversation, and back. Nothing is generated.

The names are vLLM's. Field names beyond these are ignored, as everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from serve_app.api.body import Body
from serve_app.api.schemas import ChatMessage, TokenIds
from serve_app.api.unsupported import refuse
from serve_app.text.model_text import ModelText


class TokenizeRequest(Body):
    """A `prompt` as /v1/completions takes it, or `messages` as /v1/chat/completions does.

    Without `add_special_tokens` a prompt gets no BOS.
    """

    model: str
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "is required, or messages instead, but not both")
        return self


class DetokenizeRequest(Body):
    """`tokens` are ids of the model's vocabulary."""

    model: str
    tokens: TokenIds


def tokenize(body: TokenizeRequest, text: ModelText, max_model_len: int) -> dict[str, Any]:
    """The answer of /tokenize. Raises ApiError 400."""
    if body.messages is not None:
        ids = text.render_chat([message.for_template() for message in body.messages])
    else:
        ids = text.encode_prompt(body.prompt or "", add_bos=body.add_special_tokens)
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}


def detokenize(body: DetokenizeRequest, text: ModelText) -> dict[str, Any]:
    """The answer of /detokenize: control tokens have no text. Raises ApiError 400."""
    return {"prompt": text.decode(text.check_ids(body.tokens, "tokens"))}
