"""Keeps the spelling of control tokens inside user text from becoming control tokens.

A chat template joins its own control tokens with the users' text, and what it makes is one string, in which
a user's "<|im_end|>" looks like the template's. So, before rendering, every control spelling inside user
text is wrapped in two marks: code points that occur nowhere in the request nor in the template. After
rendering, a marked spelling is plain text; any other is the template's own. Text without control spellings
is not touched, so it is rendered and tokenised exactly as without all this, and templates may trim, split
or replace as they like.

A text that ends in the beginning of a spelling, or begins with a later part of one, gets a mark at that
edge: two texts can not make a spelling together, nor with what the template puts between them. Marks are
dropped before tokenising.

Limits. A template that *deletes* characters from the middle of user text could still make a spelling (none
known does). Escaping non-ASCII in a template (`tojson(ensure_ascii=True)`) shows the marks as escapes in
the prompt: harmless noise, and only beside a control spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from serve_app.text.tokenizer import Tokenizer


class Marks(NamedTuple):
    """Two code points that open and close a wrapped spelling."""

    opening: str
    closing: str


def choose_marks(*texts: str) -> Marks:
    """Two private-use code points (U+F0000 and on) that none of `texts` holds."""
    used = {char for text in texts if not text.isascii() for char in text}
    free = (char for code in range(0xF0000, 0xFFFFE) if (char := chr(code)) not in used)
    return Marks(next(free), next(free))


class ControlText:
    """Marks control spellings in user text, and tokenises what a template made of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pattern = tokenizer.control_pattern
        spellings = tokenizer.control_tokens.keys()
        self._beginnings = tuple({text[:cut] for text in spellings for cut in range(1, len(text))})
        self._ends = tuple({text[cut:] for text in spellings for cut in range(1, len(text))})
        self._joined = "\n".join(spellings)

    def mark_message(self, message: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
        """A message (or a part of one) with every text of the user marked. Field names and the values of
        `role` and `type` are ours, checked against lists; templates compare them, so they stay as they
        are."""
        marked: dict[str, Any] = {}
        for field, value in message.items():
            if field in ("role", "type"):
                marked[field] = value
            elif field == "tool_calls":
                marked[field] = [self.mark_message(call, marks) for call in value]
            elif field == "function":
                marked[field] = self.mark_message(value, marks)
            else:
                marked[field] = self._mark(value, marks)
        return marked

    def encode(self, rendered: str, marks: Marks) -> list[int]:
        """Ids of a rendered template whose user text was marked."""
        if marks.opening not in rendered and marks.closing not in rendered:
            return self._tokenizer.encode_control(rendered)
        ids: list[int] = []
        begin = 0
        for match in self._pattern.finditer(rendered):
            # One mark is enough: a template that cuts text may have lost the other.
            opened = rendered.endswith(marks.opening, 0, match.start())
            if opened or rendered.startswith(marks.closing, match.end()):
                ids += self._encode_piece(rendered[begin : match.start()], marks)
                ids += self._tokenizer.encode_text(match[0])
                begin = match.end()
        return ids + self._encode_piece(rendered[begin:], marks)

    def _encode_piece(self, piece: str, marks: Marks) -> list[int]:
        parts = piece.replace(marks.closing, marks.opening).split(marks.opening)
        clean = "".join(parts)
        # Were the marks keeping a spelling apart? Then the text must stay cut where they are.
        if self._pattern.findall(clean) == self._pattern.findall(piece):
            return self._tokenizer.encode_control(clean)
        return [token for part in parts for token in self._tokenizer.encode_control(part)]

    def _mark(self, value: Any, marks: Marks) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, marks)
        if isinstance(value, list):
            return [self._mark(item, marks) for item in value]
        if isinstance(value, Mapping):
            return {self._mark_text(key, marks): self._mark(item, marks) for key, item in value.items()}
        return value

    def _mark_text(self, text: str, marks: Marks) -> str:
        marked = self._pattern.sub(lambda match: marks.opening + match[0] + marks.closing, text)
        # Edges are looked for inside of white space, which a template may trim.
        core = marked.strip()
        if not core:
            return marked
        inside = core in self._joined
        begin = marked.index(core)
        end = begin + len(core)
        opening = marks.opening if inside or core.startswith(self._ends) else ""
        closing = marks.closing if inside or core.endswith(self._beginnings) else ""
        return marked[:begin] + opening + core + closing + marked[end:]
