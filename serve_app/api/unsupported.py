"""Fields we know and do not serve: any value but the harmless ones is refused, never ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic_core import PydanticCustomError

_TEXT_ONLY = "is not supported: this server answers in plain text only"
_STRUCTURED = "is not supported yet: output cannot be constrained to a schema or grammar"
_TEMPLATE = "is not accepted: the chat template comes from the model alone"
_DECODING = "is not supported: tokens are sampled one sequence at a time"

# field -> (values that change nothing besides null, what is said of any other)
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), _TEMPLATE),
    "allowed_token_ids": (([],), "is not supported yet"),
    "audio": ((), _TEXT_ONLY),
    "bad_words": (([],), "is not supported yet"),
    "cache_salt": ((), "is not supported: the prefix cache is each tenant's own, and no finer"),
    "chat_template": ((), _TEMPLATE),
    "chat_template_args": (({},), _TEMPLATE),
    "chat_template_kwargs": (({},), _TEMPLATE),
    "continue_final_message": ((False,), "is not supported: the answer is always a new assistant message"),
    "documents": (([],), "is not supported"),
    "function_call": (("none",), "is not supported: this server does not call functions"),
    "functions": (([],), "is not supported: this server does not call functions"),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "include_stop_str_in_output": ((False,), "is not supported: a stop string is never part of the output"),
    "kv_transfer_params": (({},), "is not supported"),
    "length_penalty": ((1, 1.0), _DECODING),
    "logits_processors": (([],), "is not supported"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "prediction": ((), "is not supported"),
    "prompt_embeds": ((), _TEXT_ONLY),
    "prompt_logprobs": ((), "is not supported: /v1/completions gives them with echo and logprobs"),
    "response_format": (({"type": "text"},), _STRUCTURED),
    "return_token_ids": ((False,), "is not supported: /tokenize gives the tokens of a text"),
    "return_tokens_as_token_ids": ((False,), "is not supported: tokens are shown as text"),
    "skip_special_tokens": ((True,), "is not supported: control tokens are never part of the output"),
    "structured_outputs": ((), _STRUCTURED),
    "suffix": (("",), "is not supported"),
    "truncate_prompt_tokens": ((), "is not supported: a prompt is never cut"),
    "use_beam_search": ((False,), _DECODING),
    "web_search_options": ((), "is not supported"),
}

REFUSED_FIELDS = frozenset({*UNSUPPORTED, "tools", "tool_choice"})
"""All that `check_unsupported` looks at."""


def check_unsupported(body: Mapping[str, Any]) -> None:
    """Raise a PydanticCustomError for a field we do not serve; `at` in its context is the field's name."""
    for field, sent in body.items():
        if field not in UNSUPPORTED or sent is None:
            continue
        harmless, message = UNSUPPORTED[field]
        # Types must agree as well: false is not 0.
        if not any(type(sent) is type(value) and sent == value for value in harmless):
            refuse(field, message)
    if body.get("tools") not in (None, []) and body.get("tool_choice") != "none":
        refuse("tools", "is not supported yet: leave it out or send tool_choice 'none'")
    if body.get("tool_choice") not in (None, "none", "auto"):
        refuse("tool_choice", "is not supported yet: leave it out or send 'none'")


def refuse(at: str, message: str) -> NoReturn:
    """Refuse the field at path `at`, relative to the model being validated."""
    raise PydanticCustomError("refused", "{message}", {"message": message, "at": at})
