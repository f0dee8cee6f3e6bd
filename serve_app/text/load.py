"""The tokenizer of a resolved model source."""

from __future__ import annotations

from engine_actor.loading.source import ResolvedSource
from serve_app.text.gguf_tokenizer import gguf_tokenizer
from serve_app.text.hf_tokenizer import hf_tokenizer
from serve_app.text.tokenizer import Tokenizer


def load_tokenizer(source: ResolvedSource) -> Tokenizer:
    """Read the tokenizer from where the weights come from. Raises LoadError."""
    return gguf_tokenizer(source.path) if source.kind == "gguf" else hf_tokenizer(source.path)
