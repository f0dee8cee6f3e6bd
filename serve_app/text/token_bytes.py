"""The bytes a token stands for. Exact per token, so that decoding can go token by token without looking back.

A vocabulary spells its tokens in one of two ways: byte-level (GPT-2 and its heirs: each byte is a printable
character) or sentencepiece (text with U+2581 for space, single bytes as `<0xE4>`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from engine_actor.loading.source import LoadError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (as in GPT-2): printable Latin-1
    stands for itself, the others for U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def token_to_bytes(decoder: Any) -> Callable[[str], bytes]:
    """The rule from a token's spelling to its bytes, for a decoder of the `tokenizers` library.

    Raises LoadError for decoders that are neither byte-level nor sentencepiece.
    """
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _from_byte_level
    if kinds == ["Metaspace"] or (
        "ByteFallback" in kinds and {*kinds} <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    ):
        return _from_sentencepiece
    raise LoadError(f"the tokenizer's decoder ({', '.join(map(str, kinds))}) is not supported")


_CHARACTER_TO_BYTE = {character: byte for byte, character in enumerate(byte_alphabet())}


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_CHARACTER_TO_BYTE[character] for character in token)
    except KeyError:  # an added token, spelled as plain text
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    piece = _BYTE_PIECE.fullmatch(token)
    return bytes([int(piece[1], 16)]) if piece else token.replace(_SPACE_MARK, " ").encode()
