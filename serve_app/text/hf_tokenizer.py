"""A tokenizer out of a Hugging Face model directory: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from engine_actor.loading.source import LoadError
from serve_app.text.tokenizer import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def hf_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory.

    End tokens: those of generation_config.json, config.json and tokenizer_config.json together. Chat
    template: chat_template.jinja before the `chat_template` of tokenizer_config.json. Raises LoadError,
    naming the file.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise LoadError(f"{directory} has no tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise LoadError(f"{path} can not be read: {error}") from error
    config = _read(directory / "tokenizer_config.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    ends = [ids.get("eos_token")]
    for file in ("generation_config.json", "config.json"):
        value = _read(directory / file).get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    return Tokenizer(
        backend,
        eos_token_ids=[index for index in ends if index is not None],
        bos_token_id=ids.get("bos_token"),
        add_bos=_adds_bos(backend, config, ids.get("bos_token")),
        chat_template=_chat_template(directory, config),
        template_tokens=named,
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _adds_bos(backend: Backend, config: dict[str, Any], bos: int | None) -> bool:
    stated = config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return bos is not None and backend.encode("a", add_special_tokens=True).ids[:1] == [bos]


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {item.get("name"): item.get("template") for item in template}.get("default")
    return template if isinstance(template, str) else None
