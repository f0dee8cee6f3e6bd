"""The model as the native kernels see it: ctypes structures that mirror those of src/kernels.h and src/step.cpp."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.config import ModelConfig
from engine_actor.loading.layout import EMBEDDING, OUTPUT, ROPE_FREQUENCY_FACTORS
from engine_actor.models.layers import rope_frequencies
from engine_actor.native.build import NativeUnavailable
from engine_actor.native.memory import Arena, zeros
from engine_actor.native.packing import BF16, INT4, INT8, INT8_GROUP, LANES, PackedWeight, interleave, pack

MAX_HEAD_DIM = 256
QUANTIZATIONS = {"none": (BF16, BF16), "int8": (INT8, INT8), "int4": (INT4, INT8)}
"""Formats of the layers and of the output layer, whose rows are the embedding as well where the two are tied."""

_pointer, _int = ctypes.c_void_p, ctypes.c_int32


class Heads(ctypes.Structure):
    _fields_ = [(name, _int) for name in ("heads", "kv_heads", "head_dim")]


class Weight(ctypes.Structure):
    _fields_ = [("data", _pointer), ("scales", _pointer), ("n", _int), ("k", _int), ("format", _int)]


class Activations(ctypes.Structure):
    _fields_ = [(name, _pointer) for name in ("values", "bytes", "scales", "sums")]


class Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _pointer),
        ("qkv", Weight),
        ("qkv_bias", _pointer),
        ("output", Weight),
        ("post_attention_norm", _pointer),
        ("gate_up", Weight),
        ("down", Weight),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("heads", Heads),
        *((name, _int) for name in ("num_layers", "hidden", "inner", "vocab", "num_pages")),
        ("eps", ctypes.c_float),
        ("layers", _pointer),
        ("norm", _pointer),
        ("embedding", _pointer),
        ("lm_head", Weight),
        *((name, _pointer) for name in ("frequencies", "keys", "values")),
    ]


def check_shape(config: ModelConfig, quantization: str) -> None:
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
    if quantization == "none":
        return
    inputs = {
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "size of all heads": config.num_heads * config.head_dim,
    }
    for name, size in inputs.items():
        if size % INT8_GROUP:
            raise NativeUnavailable(f"{quantization} needs a {name} that {INT8_GROUP} divides, not {size}")


class PackedModel:
    """The model and its KV pool, [layers, pages, kv_heads, head_dim * 16] for keys and for values."""

    def __init__(self, checkpoint: Checkpoint, num_pages: int, quantization: str = "none") -> None:
        """Reads the weights of a checked checkpoint, one tensor at a time."""
        self.config = config = checkpoint.config
        check_shape(config, quantization)
        self._weights = checkpoint.weights
        self._arena = Arena()
        self._layer_format, output_format = QUANTIZATIONS[quantization]
        layers = (Layer * config.num_layers)(*(self._layer(i) for i in range(config.num_layers)))
        factors = None
        if ROPE_FREQUENCY_FACTORS in self._weights.shapes:
            factors = self._weights.read(ROPE_FREQUENCY_FACTORS)
        embedding = self._weights.read(EMBEDDING)
        tied = config.tie_word_embeddings
        pool = (config.num_layers, num_pages, config.num_kv_heads, config.head_dim * 16)
        keys, values = zeros(pool, torch.bfloat16), zeros(pool, torch.bfloat16)
        self.struct = Model(
            heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            num_pages=num_pages,
            eps=config.rms_norm_eps,
            layers=ctypes.addressof(layers),
            norm=self._arena.keep(self._weights.read("model.norm.weight").float()),
            embedding=None if tied else self._arena.keep(embedding.bfloat16()),
            lm_head=self._weight(embedding if tied else self._weights.read(OUTPUT), output_format),
            frequencies=self._arena.keep(rope_frequencies(config, factors)),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
        )
        self._kept: tuple[Any, ...] = (layers, keys, values)  # what the pointers point to, beside the arena

    def _layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        read, form = self._weights.read, self._layer_format
        attention = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        biases = [f"{name}.bias" for name in attention]
        bias = None
        if biases[0] in self._weights.shapes:
            bias = self._arena.keep(torch.cat([read(name) for name in biases]).float())
        gate_up = interleave(*(read(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")))
        return Layer(
            input_norm=self._arena.keep(read(prefix + "input_layernorm.weight").float()),
            qkv=self._weight(torch.cat([read(f"{name}.weight") for name in attention]), form),
            qkv_bias=bias,
            output=self._weight(read(prefix + "self_attn.o_proj.weight"), form),
            post_attention_norm=self._arena.keep(read(prefix + "post_attention_layernorm.weight").float()),
            gate_up=self._weight(gate_up, form),
            down=self._weight(read(prefix + "mlp.down_proj.weight"), form),
        )

    def _weight(self, weight: torch.Tensor, form: int) -> Weight:
        return weight_struct(pack(weight, form), self._arena)


def weight_struct(packed: PackedWeight, arena: Arena) -> Weight:
    """The structure of a packed weight, whose memory is the arena's."""
    scales = None if packed.scales is None else arena.keep(packed.scales)
    return Weight(arena.keep(packed.data), scales, packed.n, packed.k, packed.format)
