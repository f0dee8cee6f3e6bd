"""Log probabilities in the shapes of the OpenAI API (chat/object, completions/object)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.text.token_entries import TokenEntry, TokenText


def chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """`logprobs` of a chat choice. The bytes of all tokens together are the text; control tokens have none."""

    def token(text: TokenText, logprob: float | None) -> dict[str, Any]:
        return {"token": text.spelling, "logprob": logprob, "bytes": list(text.data)}

    return {
        "content": [
            {
                **token(entry.token, entry.logprob),
                "top_logprobs": [token(text, logprob) for text, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """`logprobs` of a completion choice. The likeliest tokens come with the chosen one, where it is none of them; the
    first token of a prompt has neither."""
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        likeliest: dict[str, float] = {}
        for text, logprob in (*entry.top, (entry.token, entry.logprob)):
            likeliest.setdefault(_name(text), logprob)
        top.append(likeliest)
    return {
        "tokens": [_name(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.offset for entry in entries],
    }


def _name(text: TokenText) -> str:
    """The endpoint has no field for bytes: parts of characters are marked as such."""
    return text.spelling if text.is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.data)
