"""What a decoder is: the fields that every executor computes from. No torch: the gateway reads it too."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine_actor.loading.source import LoadError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context.

    "linear" divides all by `factor`. "llama3" and "yarn" divide the long waves alone, told from short ones by
    their turns within `original_max_position_embeddings`: up to low_freq_factor turns are stretched, from
    high_freq_factor on kept (yarn calls these beta_slow and beta_fast). yarn also scales queries and keys by
    `attention_factor` each.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and its family's habits. `architecture` is the Hugging Face class name.

    `max_position_embeddings` is the longest context the model is made for. `eos_token_ids` holds every configured
    end token, ascending. `weights_dtype` is the type that the weights were made in, "unknown" where the
    checkpoint does not say.

    The fields with a default are what sets other families apart from Llama:
    `qkv_bias` q, k and v have a bias; `qk_norm` each head of q and k passes an RMS norm before it is rotated;
    `post_norms` attention and MLP pass a norm each before they are added to the residual; `norm_offset` is added
    to every norm weight; `embedding_scale` multiplies the embedded tokens; `query_scalar` (None: head_dim) sets
    the attention scale; layers in `sliding_layers` see `sliding_window` tokens, the own one included, and rotate
    by `local_rope_theta`, unscaled, where that is set; `logit_softcap` c replaces a final logit x by
    c * tanh(x / c).
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weights_dtype: str
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    query_scalar: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"{self.num_heads} heads can not share {self.num_kv_heads} key/value heads evenly"
            )

    @property
    def attention_scale(self) -> float:
        """What q · k is multiplied by, yarn's factors included: they commute with the rotation."""
        factor = self.rope_scaling.attention_factor if self.rope_scaling else 1.0
        return factor**2 / math.sqrt(self.query_scalar or self.head_dim)

    def window(self, layer: int) -> int | None:
        """How many tokens a layer sees, None for all."""
        return self.sliding_window if layer in self.sliding_layers else None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises LoadError naming the file when it is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise LoadError(f"{file}: not a JSON object")
    return content


def need(mapping: dict[str, Any], key: str, file: Path) -> Any:
    """A field that must be there. Raises LoadError naming file and field."""
    if mapping.get(key) is None:
        raise LoadError(f"{file}: field {key!r} is missing")
    return mapping[key]
