"""Chat messages to token ids through the model's own Jinja template, never one from a request.

The environment is the one `transformers` gives templates (sandboxed and immutable, block trimming, loop
controls, `raise_exception`, `strftime_now`, `tojson`), so published templates render alike. Control tokens
come from the template alone: see control_text.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_actor.loading.source import LoadError
from serve_app.api.errors import invalid_request
from serve_app.text.control_text import ControlText, choose_marks
from serve_app.text.tokenizer import Tokenizer


class ChatTemplate:
    """The chat template of one model, compiled. Raises LoadError when the model has none or it can not be
    parsed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise LoadError("the model has no chat template")
        self._tokenizer = tokenizer
        self._source = tokenizer.chat_template
        self._control = ControlText(tokenizer)
        try:
            self._template = _environment().from_string(self._source)
        except TemplateError as error:
            raise LoadError(f"the model's chat template can not be parsed: {error}") from error

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the conversation and the opening of the assistant's answer, with one BOS if the model
        wants one.

        `messages`: `role` and `content` (text) each, and maybe `name`, `tool_calls`, `tool_call_id`. Every
        text but the role is the user's: control spellings in it are plain text. Equals the ids of the plain
        rendering where there are none. Raises ApiError 400 when the template refuses the conversation.
        """
        marks = choose_marks(self._source, *_texts(messages))
        marked = [self._control.mark_message(message, marks) for message in messages]
        return self._tokenizer.with_bos(self._control.encode(self.render(marked), marks))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt as text. Raises ApiError 400 when the template refuses the conversation."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokenizer.template_tokens
            )
        except _RefusedError as error:
            raise invalid_request(f"The model's chat template says: {error}", "messages") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            raise invalid_request(
                "The model's chat template can not take this conversation.", "messages"
            ) from None


class _RefusedError(TemplateError):
    """Raised by a template itself."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; for us it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which belongs in no prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
