"""Which tensors a model must have, by their Hugging Face names, and the check that it has them."""

from __future__ import annotations

from collections.abc import Mapping

from engine_actor.loading.config import ModelConfig
from engine_actor.loading.source import LoadError

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
ROPE_FREQUENCY_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, [head_dim / 2]; optional, only GGUF files carry them."""

Shape = tuple[int, ...]


def decoder_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a decoder, the output layer only when it is not tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (query, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (key_value, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (key_value, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        if config.qkv_bias:
            shapes[prefix + "self_attn.q_proj.bias"] = (query,)
            shapes[prefix + "self_attn.k_proj.bias"] = (key_value,)
            shapes[prefix + "self_attn.v_proj.bias"] = (key_value,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.post_norms:
            shapes[prefix + "pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_feedforward_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, Shape], where: str) -> None:
    """Compare the tensors of a checkpoint with what the model needs.

    Raises LoadError naming every tensor that is missing, unknown or of the wrong shape. A second copy of tied
    embeddings is let through here: whether it is only a copy is the loader's to see.
    """
    expected = decoder_shapes(config)
    optional = {ROPE_FREQUENCY_FACTORS: (config.head_dim // 2,), OUTPUT: expected[EMBEDDING]}
    known = optional | expected
    problems = [f"missing: {name}" for name in expected if name not in found]
    problems += [f"unknown: {name}" for name in found if name not in known]
    problems += [
        f"wrong shape: {name} is {list(shape)}, expected {list(known[name])}"
        for name, shape in found.items()
        if name in known and shape != known[name]
    ]
    if OUTPUT in expected and OUTPUT not in found:
        problems.append("(the configuration says tie_word_embeddings=false, so lm_head.weight is needed)")
    if problems:
        raise LoadError(f"{where}: the tensors do not fit the configuration; " + "; ".join(problems))
