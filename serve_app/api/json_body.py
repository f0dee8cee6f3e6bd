"""Strict, bounded reading of a JSON request body: hostile bodies are refused before they cost anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_CONTAINERS = 10_000
MAX_MEMBERS = 10_000

_CONSTANT_MEMBER = re.compile(r'"(\w+)"\s*:\s*-?(?:NaN|Infinity)')
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_MAX_INTEGER_DIGITS = 400


class JsonError(ValueError):
    """Not acceptable. The message is for the caller; `key` is the object key at fault where one is known."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class _ConstantFound(ValueError):
    pass


def load_json(raw: bytes) -> Any:
    """Parse `raw` as RFC 8259 JSON in UTF-8, more strictly than the standard library, in linear time.

    Raises JsonError for: a byte order mark, anything but UTF-8, NUL characters (raw or escaped), lone
    surrogates, NaN and Infinity, duplicate keys, nesting deeper than MAX_DEPTH, more than MAX_CONTAINERS
    arrays and objects or MAX_MEMBERS object members, and integers of more digits than any field takes.
    """
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise JsonError("The request body must not begin with a byte order mark.")
    _check_shape(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"The request body is not UTF-8 (at byte {error.start}).") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer)
    except _ConstantFound as error:
        member = _CONSTANT_MEMBER.search(text)
        raise JsonError(
            f"The request body is not valid JSON: {error} is not a number in JSON.", member and member[1]
        ) from None
    except json.JSONDecodeError as error:
        raise JsonError(f"The request body is not valid JSON: {error.msg} at position {error.pos}.") from None
    if "\\u0000" in text or _SURROGATE_ESCAPE.search(text):
        _check_strings(value)
    return value


def _check_shape(raw: bytes) -> None:
    # Counting over the whole body is an upper bound and settles nearly every request.
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH and raw.count(b":") <= MAX_MEMBERS:
        return
    # Without escapes every quote opens or closes a string, so every second piece is outside of strings.
    outside = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    if outside.count(b":") > MAX_MEMBERS:
        raise JsonError(f"The request body has more than {MAX_MEMBERS} object members.")
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise JsonError(f"The request body has more than {MAX_CONTAINERS} arrays and objects.")
    depth = 0
    for bracket in outside.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise JsonError(f"The request body is nested deeper than {MAX_DEPTH} levels.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise JsonError("The request body has an object with a duplicate key.")
    return members


def _no_constant(literal: str) -> NoReturn:
    raise _ConstantFound(literal)


def _integer(digits: str) -> int:
    if len(digits) > _MAX_INTEGER_DIGITS:
        raise JsonError("The request body has an integer that no field can take.")
    return int(digits)


def _check_strings(value: Any) -> None:
    for text in _strings(value):
        if "\0" in text:
            raise JsonError("The request body has a NUL character in a string.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise JsonError("The request body has a lone surrogate in a string.") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
