"""One line for one mistake in a config file: the key's path, the value, and what is allowed there."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

Loc = tuple[str | int, ...]

_SECRET_FIELDS = frozenset({"api_keys", "metrics_key", "redis_url", "ssl_keyfile_password"})
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
}
_BOUNDS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
    "string_too_short": ("min_length", "at least {} character(s)"),
    "string_too_long": ("max_length", "at most {} characters"),
    "string_pattern_mismatch": ("pattern", "a string that matches {}"),
    "too_short": ("min_length", "at least {} item(s)"),
    "too_long": ("max_length", "at most {} items"),
}


class ConfigError(ValueError):
    """A config that cannot be used. The message is one line, ready for the user."""


class UnknownKey(NamedTuple):
    """A key no model has a field for: where it stands, and the keys that may stand there."""

    loc: Loc
    allowed: tuple[str, ...]


def format_path(loc: Loc) -> str:
    """`("models", 0, "dtype")` -> `models[0].dtype`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def describe_unknown(key: str | int, allowed: Sequence[str]) -> str:
    """What to say of a key that is not known."""
    close = difflib.get_close_matches(str(key), allowed, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"unknown key{hint}; allowed: {', '.join(allowed)}"


def describe(error: ValidationError, model: type[BaseModel], data: Any, prefix: Loc = ()) -> str:
    """The first mistake of `error` as `path: what is wrong; allowed: ...`, and how many more there are.

    `data` is what was validated against `model`; `prefix` is its place in the file.
    """
    details = error.errors(include_url=False)
    # A misspelt key usually brings a "missing" of its own: name the key first.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    detail = details[0]
    loc = _as_written(data, detail["loc"])
    text = f"{format_path(prefix + loc)}: " if prefix + loc else ""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        text += describe_unknown(loc[-1], _fields_at(model, loc[:-1]))
    elif kind == "missing":
        text += "is missing"
    elif kind == "value_error":
        text += str(context["error"])
    else:
        text += f"{_shown(value, loc)} is not allowed; allowed: {_allowed(kind, context, detail['msg'])}"
    return text + (f" (and {len(details) - 1} more)" if len(details) > 1 else "")


def unknown_keys(data: Any, model: type[BaseModel], prefix: Loc = ()) -> Iterator[UnknownKey]:
    """Keys of `data` that `model` would drop in silence, at any depth."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        if key not in model.model_fields:
            yield UnknownKey((*prefix, key), tuple(model.model_fields))
        elif (inner := _model_in(model.model_fields[key].annotation)) is not None:
            if isinstance(value, list):
                for index, item in enumerate(value):
                    yield from unknown_keys(item, inner, (*prefix, key, index))
            else:
                yield from unknown_keys(value, inner, (*prefix, key))


def _allowed(kind: str, context: dict[str, Any], message: str) -> str:
    if kind in ("literal_error", "enum"):
        return str(context["expected"]).replace(" or ", ", ").replace("'", "")
    if kind in _BOUNDS:
        name, phrase = _BOUNDS[kind]
        return phrase.format(context[name])
    return _TYPES.get(kind.split("_")[0], message)


def _shown(value: Any, loc: Loc) -> str:
    """The value as a message may show it: never a secret, and nothing that may hold one."""
    names = [part for part in loc if isinstance(part, str)]
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list" if value else "an empty list"
    text = repr(value)
    if (names and names[-1] in _SECRET_FIELDS) or "eh_" in text:
        return "the value given"
    return text if len(text) <= 80 else text[:77] + "..."


def _as_written(data: Any, loc: Loc) -> Loc:
    """Cut what pydantic adds to a location that the file does not have, such as the branch of a union."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        is_item = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_item or (isinstance(data, dict) and part in data):
            data = data[part]
        elif isinstance(data, dict) and index == len(loc) - 1:  # a missing key
            return (*path, part)
        else:
            break
        path.append(part)
    return tuple(path)


def _fields_at(model: type[BaseModel], loc: Loc) -> tuple[str, ...]:
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            inner = _model_in(model.model_fields[part].annotation)
            if inner is None:
                return ()
            model = inner
    return tuple(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first pydantic model named in an annotation such as `list[Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if (found := _model_in(argument)) is not None:
            return found
    return None
