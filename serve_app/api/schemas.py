"""Bodies of POST /v1/chat/completions and /v1/completions: fields, ranges, and one clear error each.

Rules: types are strict (no "0.5", no true for 1); null means absent; fields we know and do not serve are
refused (unsupported.py); any other unknown field is ignored, as is `user`: identity comes from the API key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from serve_app.api.body import Body
from serve_app.api.errors import quote
from serve_app.api.json_body import JsonError, load_json
from serve_app.api.sampling_fields import SamplingFields
from serve_app.api.unsupported import check_unsupported, refuse

MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI documents for /v1/completions

_INT32_MAX = 2**31 - 1

TokenCount = Annotated[int, Field(ge=1, le=_INT32_MAX)]


# JSON Schema of what validators below take in more than one form.
_TEXT = {"type": "string"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": _INT32_MAX}}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}


def _many(items: dict[str, Any], most: int | None, least: int = 0) -> dict[str, Any]:
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        **({} if most is None else {"maxItems": most}),
    }


def _whole_ids(ids: Any) -> Any:
    if isinstance(ids, list):
        _check_ids(ids, "")
    return ids


# The item check of our own is ten times as fast as a range on each item, and names the item the same way.
TokenIds = Annotated[list[int], BeforeValidator(_whole_ids), WithJsonSchema(_IDS)]


class FunctionCall(Body):
    """The function of a past tool call; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str = ""


class ToolCall(Body):
    """A past tool call in the history of a conversation."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message. Parts are joined without a separator: the same text gives the same tokens in either form.

    `content` is None only beside tool calls. An assistant's `refusal`, as a field or as a part, is what it said.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, WithJsonSchema({"anyOf": [_TEXT, _many(_TEXT_PART, None, 1), {"type": "null"}]})
    ] = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        if not content:
            refuse("", "must hold at least one part")
        return "".join(_text_of_part(part, f"[{index}]") for index, part in enumerate(content))

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            refuse("tool_calls", "belongs to messages of role 'assistant'")
        if self.refusal and self.role != "assistant":
            refuse("refusal", "belongs to messages of role 'assistant'")
        if self.content is None and not self.tool_calls and not self.refusal:
            refuse("content", "is required (only an assistant message with tool_calls may leave it out)")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: `developer` is `system`, missing content is empty, tool
        arguments are objects where they parse as such."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or self.refusal or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message


class StreamOptions(Body):
    """`include_usage` asks for one more chunk, with the usage, after the last choice has finished;
    `continuous_usage_stats`, beside it, for the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _GenerationRequest(SamplingFields):
    """What both endpoints share. `top_k` 0 switches the filter off (-1 is taken as 0)."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=_INT32_MAX)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[
        list[str],
        Field(max_length=MAX_STOP_STRINGS),
        WithJsonSchema({"anyOf": [_STOP, _many(_STOP, MAX_STOP_STRINGS)]}),
    ] = Field(default=[])
    n: Annotated[int, Field(ge=1, le=8)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_unsupported(data)
        return data

    @field_validator("top_k", mode="before")
    @classmethod
    def _all_tokens(cls, top_k: Any) -> Any:
        return 0 if type(top_k) is int and top_k == -1 else top_k

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _stop_lengths(cls, stop: list[str]) -> list[str]:
        for index, text in enumerate(stop):
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                refuse(f"[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters")
        return stop

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> _GenerationRequest:
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatCompletionRequest(_GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _agree(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "is only allowed when logprobs is true")
        if self.echo:
            refuse("echo", "is not supported here: /v1/completions has it")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            refuse("max_tokens", "differs from max_completion_tokens: send one of them")
        return self

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None: as many as fit the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        """How many likeliest tokens come with each log probability; None: no log probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        return [message.for_template() for message in self.messages]


class CompletionRequest(_GenerationRequest):
    """POST /v1/completions. `prompts` are texts or token ids (integers >= 0, not yet checked against the
    vocabulary), whatever form `prompt` had. The choice index of prompt p is p * n + choice. Without
    `add_special_tokens` a text gets no BOS."""

    prompts: Annotated[
        list[str | list[int]],
        Field(alias="prompt"),
        WithJsonSchema({"anyOf": [_TEXT, _IDS, _many(_TEXT, MAX_PROMPTS, 1), _many(_IDS, MAX_PROMPTS, 1)]}),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] = DEFAULT_COMPLETION_TOKENS
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompts", mode="before")
    @classmethod
    def _prompt_list(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            refuse("", "must be a string, a list of strings, a list of token ids or a list of such lists")
        if not prompt:
            refuse("", "must not be empty")
        if type(prompt[0]) is int:
            _check_ids(prompt, "")
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            refuse("", f"must hold at most {MAX_PROMPTS} prompts")
        for index, member in enumerate(prompt):
            if type(member) not in (str, list) or type(member) is not type(prompt[0]):
                refuse(f"[{index}]", "must be a string or a list of token ids, and all prompts of one kind")
            if isinstance(member, list):
                _check_ids(member, f"[{index}]")
        return prompt

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            refuse("best_of", "is not supported unless it equals n")
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "must be at least 1; 0 needs echo")
        return self

    @property
    def likeliest(self) -> int | None:
        """How many likeliest tokens come with each log probability; None: no log probabilities are wanted."""
        return self.logprobs

    @property
    def output_limit(self) -> int:
        """Most tokens to generate for each choice."""
        return self.max_tokens


def _text_of_part(part: Any, at: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        refuse(at, "must be an object with a type")
    kind = part["type"]
    if kind not in ("text", "refusal"):
        refuse(at, f"is of type {quote(kind)}: only parts of type 'text' are supported")
    if not isinstance(part.get(kind), str):
        refuse(f"{at}.{kind}", "must be a string")
    return str(part[kind])


def _check_ids(ids: list[Any], at: str) -> None:
    if not ids:
        refuse(at, "must hold at least one token id")
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= _INT32_MAX:
            refuse(f"{at}[{index}]", "is not a token id")


def _arguments(text: str) -> Any:
    try:
        arguments = load_json(text.encode())
    except JsonError:
        return text
    return arguments if isinstance(arguments, dict) else text
