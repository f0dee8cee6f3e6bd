"""A tokenizer out of the metadata of a GGUF file (keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine_actor.loading.gguf_header import read_gguf_header
from engine_actor.loading.source import LoadError
from serve_app.text.tokenizer import END_OF_TURN, Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type

_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORDS_AND_SPACE}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORDS_AND_SPACE}"

_SPACE_MARK = "▁"


def gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises LoadError for kinds we do not build exactly, by their name."""
    metadata = read_gguf_header(path).metadata
    try:
        return _build(metadata)
    except KeyError as error:
        raise LoadError(
            f"{path}: metadata key {error} is missing, so there is no tokenizer in the file"
        ) from error
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error


def _build(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata["tokenizer.ggml.model"]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        backend = _byte_level(pre, tokens, metadata["tokenizer.ggml.merges"])
        bos_by_default = pre == "llama-bpe"
    elif kind == "llama":
        add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        backend = _sentencepiece(tokens, metadata["tokenizer.ggml.scores"], types, add_prefix)
        bos_by_default = True
    else:
        raise LoadError(f"tokenizer.ggml.model {kind!r} is not supported (gpt2 and llama are)")
    control, ordinary = [], []
    for token, token_type in zip(tokens, types, strict=True):
        # Some files mark end-of-turn tokens as ordinary ones: they are control tokens whatever the file says.
        if token_type in (_UNKNOWN, _CONTROL) or token in END_OF_TURN:
            control.append(AddedToken(token, special=True, normalized=False))
        elif token_type == _USER_DEFINED:
            ordinary.append(AddedToken(token, special=False, normalized=False))
    # All at once: each call looks at every added token again, and some models have thousands.
    backend.add_special_tokens(control)
    backend.add_tokens(ordinary)
    ids = {short: metadata.get(f"tokenizer.ggml.{name}_token_id") for short, name in _NAMED_TOKENS.items()}
    for name, index in ids.items():
        if index is not None and index >= len(tokens):
            raise LoadError(f"the {name} token {index} is not below the vocabulary size {len(tokens)}")
    return Tokenizer(
        backend,
        eos_token_ids=[index for name in ("eos", "eot", "eom") if (index := ids[name]) is not None],
        bos_token_id=ids["bos"],
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", bos_by_default),
        chat_template=metadata.get("tokenizer.chat_template"),
        template_tokens={f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
        unused=[index for index, token_type in enumerate(types) if token_type == _UNUSED],
    )


def _byte_level(pre: str, tokens: Sequence[str], merges: Sequence[str]) -> Backend:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = {
        "default": byte_level,
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"), bytes_only]
        ),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"), bytes_only]),
    }
    if pre not in splits:
        raise LoadError(f"tokenizer.ggml.pre {pre!r} is not supported ({', '.join(splits)} are)")
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_pairs(merges),
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splits[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def _sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], add_space_prefix: bool
) -> Backend:
    """BPE over text with U+2581 for space, unknown characters as byte pieces, and a space before each
    stretch of text as the file asks. The file gives scores, no merges: a pair merges when the pieces exist,
    best score first."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for index, token in enumerate(tokens):
        if types[index] in (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], vocab[left], vocab[right], left, right))
    merges.sort()
    unknown = next((token for index, token in enumerate(tokens) if types[index] == _UNKNOWN), None)
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces]) if add_space_prefix else spaces
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend
