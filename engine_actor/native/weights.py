"""Weights in the layout of the native kernels, and the structures that point to them.

The ctypes structures mirror the ones of the same name in src/kernels.h and src/step.cpp.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from engine_actor.loading.checkpoint import Checkpoint, Weights
from engine_actor.loading.config import ModelConfig
from engine_actor.loading.layout import EMBEDDING, OUTPUT, ROPE_FREQUENCY_FACTORS
from engine_actor.models.layers import rope_frequencies
from engine_actor.native.build import NativeUnavailable

LANES = 16
MAX_HEAD_DIM = 256
_COLUMNS = 32


class Heads(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim")]


class Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("input_norm", "qkv", "qkv_bias", "output", "post_attention_norm", "gate_up", "down")
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("shape", Heads),
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "inner", "vocab", "num_pages")),
        ("eps", ctypes.c_float),
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "norm", "embedding", "lm_head", "frequencies", "keys", "values")
        ),
    ]


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [n, k], k even, as bfloat16 [ceil(n / 32), k / 2, 32, 2]; missing columns are zeros."""
    n, k = weight.shape
    blocks = -(-n // _COLUMNS)
    padded = torch.zeros(blocks * _COLUMNS, k, dtype=torch.bfloat16)
    padded[:n] = weight
    return padded.view(blocks, _COLUMNS, k // 2, 2).transpose(1, 2).contiguous()


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of two weights [n, k] in turns of 16: [2 n, k]."""
    k = gate.shape[1]
    return torch.stack((gate.view(-1, LANES, k), up.view(-1, LANES, k)), dim=1).reshape(-1, k)


def check_shape(config: ModelConfig) -> None:
    """Raise NativeUnavailable for a model that the kernels can not compute."""
    sizes = {
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "head size": config.head_dim,
    }
    for name, size in sizes.items():
        if size % LANES:
            raise NativeUnavailable(f"the {name} {size} is not a multiple of {LANES}")
    if config.head_dim > MAX_HEAD_DIM:
        raise NativeUnavailable(f"the head size {config.head_dim} is above {MAX_HEAD_DIM}")
    missing = {
        "norms of query and key heads": config.qk_norm,
        "norms behind attention and MLP": config.post_norms,
        "an offset of norm weights": config.norm_offset != 0.0,
        f"the activation {config.activation}": config.activation != "silu",
        "scaled embeddings": config.embedding_scale != 1.0,
        "an attention scale of its own": not math.isclose(config.attention_scale, config.head_dim**-0.5),
        "sliding windows": bool(config.sliding_layers),
        "capped logits": config.logit_softcap is not None,
    }
    absent = [feature for feature, needed in missing.items() if needed]
    if absent:
        raise NativeUnavailable(
            f"{config.architecture} needs what the kernels do not have: {', '.join(absent)}"
        )


class PackedModel:
    """The model and its KV pool, [layers, pages, kv_heads, head_dim * 16] for keys and for values."""

    def __init__(self, checkpoint: Checkpoint, num_pages: int) -> None:
        """Reads the weights of a checked checkpoint, one tensor at a time."""
        self.config = config = checkpoint.config
        check_shape(config)
        weights = checkpoint.weights
        self._kept: list[Any] = []  # what the pointers below point to
        layers = (Layer * config.num_layers)(*(self._layer(weights, i) for i in range(config.num_layers)))
        factors = weights.read(ROPE_FREQUENCY_FACTORS) if ROPE_FREQUENCY_FACTORS in weights.shapes else None
        embedding = weights.read(EMBEDDING).bfloat16()
        pool = (config.num_layers, num_pages, config.num_kv_heads, config.head_dim * 16)
        self.struct = Model(
            shape=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            num_pages=num_pages,
            eps=config.rms_norm_eps,
            layers=ctypes.addressof(layers),
            norm=self._keep(weights.read("model.norm.weight").float()),
            embedding=self._keep(embedding),
            lm_head=self._keep(pack(embedding if config.tie_word_embeddings else weights.read(OUTPUT))),
            frequencies=self._keep(rope_frequencies(config, factors)),
            keys=self._keep(torch.zeros(pool, dtype=torch.bfloat16)),
            values=self._keep(torch.zeros(pool, dtype=torch.bfloat16)),
        )
        self._kept.append(layers)

    def _layer(self, weights: Weights, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        biases = [f"{name}.bias" for name in attention]
        has_bias = biases[0] in weights.shapes
        return Layer(
            input_norm=self._keep(weights.read(prefix + "input_layernorm.weight").float()),
            qkv=self._keep(pack(torch.cat([weights.read(f"{name}.weight") for name in attention]))),
            qkv_bias=self._keep(torch.cat([weights.read(name) for name in biases]).float())
            if has_bias
            else None,
            output=self._keep(pack(weights.read(prefix + "self_attn.o_proj.weight"))),
            post_attention_norm=self._keep(weights.read(prefix + "post_attention_layernorm.weight").float()),
            gate_up=self._keep(
                pack(
                    interleave(
                        weights.read(prefix + "mlp.gate_proj.weight"),
                        weights.read(prefix + "mlp.up_proj.weight"),
                    )
                )
            ),
            down=self._keep(pack(weights.read(prefix + "mlp.down_proj.weight"))),
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return int(self._kept[-1].data_ptr())
