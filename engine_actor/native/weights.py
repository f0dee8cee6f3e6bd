"""The model as the native kernels see it: ctypes structures that mirror those of src/kernels.h and src/step.cpp."""

from __future__ import annotations

import ctypes
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
    _fields_ = [
        *((name, _pointer) for name in ("data", "scales")),
        *((name, _int) for name in ("n", "k", "format", "blocks_format")),
        *((name, _pointer) for name in ("blocks", "block_scales")),
    ]


class Activations(ctypes.Structure):
    _fields_ = [(name, _pointer) for name in ("values", "bytes", "scales", "sums")]


class HeadNorms(ctypes.Structure):
    _fields_ = [("q", _pointer), ("k", _pointer), ("eps", ctypes.c_float)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("before_attention", _pointer),
        ("qkv", Weight),
        *((name, _pointer) for name in ("qkv_bias", "q_norm", "k_norm")),
        ("output", Weight),
        *((name, _pointer) for name in ("after_attention", "before_mlp")),
        ("gate_up", Weight),
        ("down", Weight),
        ("after_mlp", _pointer),
        *((name, _int) for name in ("window", "local")),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("heads", Heads),
        *((name, _int) for name in ("num_layers", "hidden", "inner", "vocab", "num_pages", "gelu")),
        *((name, ctypes.c_float) for name in ("eps", "embedding_scale", "attention_scale")),
        ("layers", _pointer),
        ("norm", _pointer),
        ("embedding", _pointer),
        ("lm_head", Weight),
        *((name, _pointer) for name in ("frequencies", "local_frequencies", "keys", "values")),
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
        self.layer_bytes = self.output_bytes = 0
        """Bytes of the weights of all layers and of the output layer, in the smallest form of each."""
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
            gelu=config.activation == "gelu_tanh",
            eps=config.rms_norm_eps,
            embedding_scale=config.embedding_scale,
            attention_scale=config.attention_scale,
            layers=ctypes.addressof(layers),
            norm=self._norm("model.norm"),
            embedding=None if tied else self._arena.keep(embedding.bfloat16()),
            lm_head=self._output(embedding if tied else self._weights.read(OUTPUT), output_format),
            frequencies=self._arena.keep(rope_frequencies(config, factors)),
            local_frequencies=self._arena.keep(rope_frequencies(config, factors, local=True)),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
        )
        self._kept: tuple[Any, ...] = (layers, keys, values)  # what the pointers point to, beside the arena

    def _layer(self, index: int) -> Layer:
        config, form, read = self.config, self._layer_format, self._weights.read
        prefix, attention = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
        bias = None
        if config.qkv_bias:
            bias = self._arena.keep(
                torch.cat([read(f"{attention}{name}_proj.bias") for name in "qkv"]).float()
            )
        # Where norms follow attention and MLP too, the name of the second Llama norm is the first of those.
        before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        return Layer(
            before_attention=self._norm(prefix + "input_layernorm"),
            qkv=self._weight(torch.cat([read(f"{attention}{name}_proj.weight") for name in "qkv"]), form),
            qkv_bias=bias,
            q_norm=self._norm(attention + "q_norm") if config.qk_norm else None,
            k_norm=self._norm(attention + "k_norm") if config.qk_norm else None,
            output=self._weight(read(attention + "o_proj.weight"), form),
            after_attention=self._norm(prefix + "post_attention_layernorm") if config.post_norms else None,
            before_mlp=self._norm(prefix + before_mlp),
            gate_up=self._weight(
                interleave(*(read(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))), form
            ),
            down=self._weight(read(prefix + "mlp.down_proj.weight"), form),
            after_mlp=self._norm(prefix + "post_feedforward_layernorm") if config.post_norms else None,
            window=config.window(index) or 0,
            local=index in config.sliding_layers,
        )

    def _norm(self, name: str) -> int:
        return self._arena.keep(self._weights.read(f"{name}.weight").float() + self.config.norm_offset)

    def _weight(self, weight: torch.Tensor, form: int) -> Weight:
        packed = pack(weight, form)
        self.layer_bytes += packed.least_bytes
        return weight_struct(packed, self._arena)

    def _output(self, weight: torch.Tensor, form: int) -> Weight:
        packed = pack(weight, form)
        self.output_bytes = packed.least_bytes
        return weight_struct(packed, self._arena)


def weight_struct(packed: PackedWeight, arena: Arena) -> Weight:
    """The structure of a packed weight, whose memory is the arena's."""
    scales = None if packed.scales is None else arena.keep(packed.scales)
    weight = Weight(arena.keep(packed.data), scales, packed.n, packed.k, packed.format)
    if packed.blocks is not None:
        weight.blocks_format = packed.blocks.format
        weight.blocks = arena.keep(packed.blocks.data)
        weight.block_scales = arena.keep(packed.blocks.scales)
    return weight
