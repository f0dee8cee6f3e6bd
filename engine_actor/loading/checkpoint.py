"""A model that was found, checked and is ready to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine_actor.loading.config import ModelConfig
from engine_actor.loading.gguf import GgufWeights
from engine_actor.loading.gguf_config import gguf_model_config
from engine_actor.loading.gguf_header import read_gguf_header
from engine_actor.loading.hf_config import hf_model_config
from engine_actor.loading.layout import EMBEDDING, OUTPUT, check_tensors
from engine_actor.loading.safetensors import SafetensorsWeights
from engine_actor.loading.source import LoadError, ResolvedSource, resolve_source


class Weights(Protocol):
    """Named tensors that are read one at a time, so that a model larger than half the memory can be
    loaded."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in its stored type (float32 where it was quantised)."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete model: every tensor that `config` asks for is in `weights`, in the right shape.

    `source.path` is also where the tokenizer is found.
    """

    config: ModelConfig
    source: ResolvedSource
    weights: Weights


def load_checkpoint(source: str, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """Find a model (see resolve_source) and check it whole; weights are read later, one by one.

    Raises LoadError naming every file, field or tensor that is missing, unknown, of the wrong shape or of an
    unsupported type, and when the output layer contradicts tie_word_embeddings.
    """
    resolved = resolve_source(source, revision, token)
    weights: Weights
    if resolved.kind == "gguf":
        header = read_gguf_header(resolved.path)
        config = gguf_model_config(header, resolved.path)
        weights = GgufWeights(resolved.path, header, config)
    else:
        config = hf_model_config(resolved.path)
        weights = SafetensorsWeights(resolved.path)
    check_tensors(config, weights.shapes, str(resolved.path))
    if config.tie_word_embeddings and OUTPUT in weights.shapes:
        _refuse_different_output(weights, resolved)
    return Checkpoint(config, resolved, weights)


def _refuse_different_output(weights: Weights, resolved: ResolvedSource) -> None:
    if not torch.equal(weights.read(OUTPUT), weights.read(EMBEDDING)):
        raise LoadError(
            f"{resolved.path}: the configuration says tie_word_embeddings=true, "
            f"but {OUTPUT} differs from {EMBEDDING}"
        )
