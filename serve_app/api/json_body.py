"""Strict, bounded reading of a JSON request body: hostile bodies are refused before they cost anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_CONTAINERS = 10_000
MAX_MEMBERS = 10_000

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}:]')
_SEARCHED = 256 * 1024
"""Characters in which a fault's place is looked for."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_MAX_INTEGER_DIGITS = 400


class JsonError(ValueError):
    """Not acceptable. The message is for the caller; `key` is the outermost key at fault where one is known."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class _Members(list[tuple[str, Any]]):
    """An object as it was written, with its duplicates."""


_FLAW = object()


def load_json(raw: bytes) -> Any:
    """Parse `raw` as RFC 8259 JSON in UTF-8, more strictly than the standard library, in linear time.

    Raises JsonError for: a byte order mark, anything but UTF-8, NUL characters (raw or escaped), lone
    surrogates, NaN and Infinity, duplicate keys, nesting deeper than MAX_DEPTH, more than MAX_CONTAINERS
    arrays and objects or MAX_MEMBERS object members, and integers of more digits than any field takes.
    """
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise JsonError("The request body must not begin with a byte order mark.")
    try:
        _check_shape(raw)
    except JsonError as error:
        raise JsonError(str(error), _outgrown_member(raw)) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"The request body is not UTF-8 (at byte {error.start}).") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer)
        if "\\u0000" in text or _SURROGATE_ESCAPE.search(text):
            _check_strings(value)
    except JsonError as error:
        raise JsonError(str(error), _flawed_member(text)) from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise JsonError(f"The request body is not valid JSON: {what} at position {error.pos}.") from None
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
    raise JsonError(f"The request body is not valid JSON: {literal} is not a number in JSON.")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_INTEGER_DIGITS:
        raise JsonError("The request body has an integer that no field can take.")
    return int(digits)


def _check_strings(value: Any) -> None:
    for text in _strings(value):
        if "\0" in text:
            raise JsonError("The request body has a NUL character in a string.")
        if not _is_unicode(text):
            raise JsonError("The request body has a lone surrogate in a string.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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


# Which member is at fault: looked for only once a body has been refused.


def _outgrown_member(raw: bytes) -> str | None:
    """The outermost key under which a limit of `_check_shape` is passed, if it is near the beginning."""
    depth = containers = members = 0
    last = key = b""
    for match in _TOKEN.finditer(raw[:_SEARCHED]):
        token = match[0]
        if token == b":":
            members += 1
            key = last if depth == 1 else key
        elif token in b"[{":
            depth, containers = depth + 1, containers + 1
        elif token in b"]}":
            depth -= 1
        else:
            last = token
        if depth > MAX_DEPTH or containers > MAX_CONTAINERS or members > MAX_MEMBERS:
            try:
                return str(json.loads(key))
            except ValueError:
                return None
    return None


def _flawed_member(text: str) -> str | None:
    """The outermost key of the first member that holds a constant, a duplicate, an integer or a string that is
    refused; found by reading the text again with all of these let through."""
    if len(text) > _SEARCHED:
        return None
    try:
        body = json.loads(
            text,
            object_pairs_hook=_Members,
            parse_constant=lambda literal: _FLAW,
            parse_int=lambda digits: _FLAW if len(digits) > _MAX_INTEGER_DIGITS else 0,
        )
    except json.JSONDecodeError:
        return None
    if not isinstance(body, _Members):
        return None
    seen: set[str] = set()
    for key, value in body:
        if key in seen or _is_flawed(value):
            return key
        seen.add(key)
    return None


def _is_flawed(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value or not _is_unicode(value)
    if isinstance(value, _Members):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(map(_is_flawed, [*keys, *(item for _, item in value)]))
    if isinstance(value, list):
        return any(map(_is_flawed, value))
    return value is _FLAW
