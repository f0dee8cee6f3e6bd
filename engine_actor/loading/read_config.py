"""The configuration of a found model, whichever form it has. No torch: the gateway reads it too."""

from __future__ import annotations

from engine_actor.loading.config import ModelConfig
from engine_actor.loading.gguf_config import gguf_model_config
from engine_actor.loading.gguf_header import read_gguf_header
from engine_actor.loading.hf_config import hf_model_config
from engine_actor.loading.source import ResolvedSource


def read_model_config(resolved: ResolvedSource) -> ModelConfig:
    """Read the configuration without touching the weights.

    Raises LoadError for a missing or damaged file or field, an unsupported architecture or an option that
    would change the computation and is not implemented.
    """
    if resolved.kind == "gguf":
        return gguf_model_config(read_gguf_header(resolved.path), resolved.path)
    return hf_model_config(resolved.path)
