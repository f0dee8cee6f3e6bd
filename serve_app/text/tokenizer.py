"""Text to token ids and back, the same way whether the vocabulary came from a GGUF file or a tokenizer.json.

Control tokens (special ones: end of turn, end of text, ...) are never read out of ordinary text unless the
caller says so, and never shown. Added tokens that are not special, as `<think>` in some models, are
ordinary vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from serve_app.text.token_bytes import byte_alphabet, token_to_bytes

# Tokens that end a turn or a text in the families we know. A file may name only one of them as "the" end
# token.
END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Tokenizer:
    """A vocabulary with its rules.

    `add_bos`: the model wants every sequence to begin with `bos_token_id`. `eos_token_ids`: all ids that
    end a generation. `chat_template`: Jinja source, None for a model without one. `template_tokens`: texts
    a template may name (`bos_token`, `eos_token`, ...). `unused`: ids with an entry but no token, as
    padding of the vocabulary. `vocab_size` counts ids from 0 to the highest, used or not.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Collection[int],
        bos_token_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
        unused: Collection[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        _forget_words(backend)
        self._backend = backend
        self._unused = frozenset(unused)
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.control_tokens = {token.content: index for index, token in added.items() if token.special}
        self._control_ids = {index: text for text, index in self.control_tokens.items()}
        self.control_pattern = re.compile(any_of(self.control_tokens))
        named = {index for text, index in self.control_tokens.items() if text in END_OF_TURN}
        self.eos_token_ids = frozenset(eos_token_ids) | named
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template
        self.template_tokens = dict(template_tokens or {})
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._to_bytes = token_to_bytes(backend.decoder)

    def save(self, path: Path) -> None:
        """Write the vocabulary with its rules as tokenizer.json."""
        self._backend.save(str(path))

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text: the spelling of a control token is text like any other. No BOS."""
        backend = self._plain_backend if self.control_pattern.search(text) else self._backend
        return backend.encode(text, add_special_tokens=False).ids

    def encode_control(self, text: str) -> list[int]:
        """Ids of trusted text: control tokens are read out of it. No BOS."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt as its author wrote it (/v1/completions): control tokens are read, one BOS
        if the model wants one."""
        return self.with_bos(self.encode_control(text))

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with a BOS in front where the model wants one and none is there yet."""
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the output in UTF-8, maybe a part of a character; nothing for control
        tokens and ids without a token."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def control_spelling(self, token_id: int) -> str | None:
        """How a control token is written, None for any other token."""
        return self._control_ids.get(token_id)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` as the continuation of some text. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def id_in_vocab(self, token_id: int) -> bool:
        """Whether there is a token of this id."""
        return (
            0 <= token_id < self.vocab_size
            and token_id not in self._unused
            and self._backend.id_to_token(token_id) is not None
        )

    def prepare(self) -> None:
        """Make now what is made once: a second or two for 200,000 tokens."""
        _ = self._plain_backend, self._bytes

    @cached_property
    def _plain_backend(self) -> Backend:
        # The switch belongs to the whole object, hence a second one.
        plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        _forget_words(plain)
        return plain

    @cached_property
    def _bytes(self) -> list[bytes]:
        # Of all tokens at once: one that takes longer the first time would tell that nobody has had it yet.
        return [
            self._to_bytes(token) if token is not None else b""
            for token in map(self._shown, range(self.vocab_size))
        ]

    def _shown(self, token_id: int) -> str | None:
        if token_id in self._control_ids or token_id in self._unused:
            return None
        return self._backend.id_to_token(token_id)


def _forget_words(backend: Backend) -> None:
    """Switch off the library's cache of words: it is faster for words that some other tenant has sent before, which
    anybody could measure. Without it whole texts take the same time."""
    if isinstance(backend.model, models.BPE | models.Unigram):  # the others have none
        backend.model._resize_cache(0)


def any_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of the texts that fits: their prefix tree, so that a mismatch costs no more
    with thousands of them than with one."""
    tree: dict[str, Any] = {}
    for text in filter(None, texts):
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(character) + pattern(child) for character, child in node.items() if character]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return joined + ("?" if "" in node else "")

    return pattern(tree) or "(?!)"


def byte_tokenizer() -> Tokenizer:
    """A tokenizer without a model, for the stub engine: id = byte of UTF-8, and a few control tokens from
    256 on."""
    alphabet = byte_alphabet()
    backend = Backend(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return Tokenizer(  # <|im_end|> ends a generation by its name
        backend,
        eos_token_ids=[],
        chat_template=BYTE_CHAT_TEMPLATE,
        template_tokens={"eos_token": "<|im_end|>"},
    )
