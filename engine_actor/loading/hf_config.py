"""The model configuration of a Hugging Face directory: config.json and the small files beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine_actor.loading.config import ModelConfig, RopeScaling, need, read_json
from engine_actor.loading.source import LoadError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
)

_GEMMA_PATTERN = 6
"""Of so many layers the last sees everything, the others a window (Gemma 3)."""


def hf_model_config(path: Path) -> ModelConfig:
    """Raises LoadError, naming file and field, as read_model_config does."""
    file = path / "config.json"
    config = read_json(file)
    architectures = config.get("architectures") or ["none"]
    architecture = next((name for name in architectures if name in SUPPORTED_ARCHITECTURES), None)
    if architecture is None:
        raise LoadError(
            f"{file}: architecture {', '.join(architectures)} is not supported "
            f"(supported: {', '.join(SUPPORTED_ARCHITECTURES)})"
        )
    gemma = architecture == "Gemma3ForCausalLM"
    _refuse_options(config, file, activation="gelu_pytorch_tanh" if gemma else "silu")
    heads = need(config, "num_attention_heads", file)
    hidden_size = need(config, "hidden_size", file)
    layers = need(config, "num_hidden_layers", file)
    context = config.get("max_position_embeddings") or (131_072 if gemma else None)
    if context is None:
        raise LoadError(f"{file}: field 'max_position_embeddings' is missing")
    rope, local_rope = _rope(config, gemma)
    scaling = _rope_scaling(rope, context, file)
    if local_rope and scaling is not None and scaling.kind == "yarn":
        raise LoadError(f"{file}: rope type 'yarn' is not supported beside a second rope of sliding layers")
    if scaling is not None and scaling.kind == "yarn":
        context = max(context, int(scaling.factor * scaling.original_max_position_embeddings))
    sliding_layers = _sliding_layers(config, architecture, layers, file)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=need(config, "intermediate_size", file),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (256 if gemma else hidden_size // heads),
        vocab_size=need(config, "vocab_size", file),
        max_position_embeddings=context,
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or (1e6 if gemma else 10000.0),
        rope_scaling=scaling,
        rms_norm_eps=need(config, "rms_norm_eps", file),
        tie_word_embeddings=config.get("tie_word_embeddings", gemma),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(path, config),
        weights_dtype=config.get("dtype") or config.get("torch_dtype") or "unknown",
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        query_scalar=config.get("query_pre_attn_scalar", 256) if gemma else None,
        sliding_window=need(config, "sliding_window", file) if sliding_layers else None,
        sliding_layers=sliding_layers,
        local_rope_theta=local_rope,
        logit_softcap=config.get("final_logit_softcapping") if gemma else None,
    )


def _refuse_options(config: dict[str, Any], file: Path, activation: str) -> None:
    """Options that would change the computation and are not implemented."""
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise LoadError(f"{file}: quantised safetensors ({method}) are not supported")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise LoadError(f"{file}: attention_bias and mlp_bias are not supported")
    for field in ("hidden_act", "hidden_activation"):
        if config.get(field) not in (None, activation):
            raise LoadError(f"{file}: {field} {config[field]!r} is not supported")
    for field in ("use_bidirectional_attention", "attn_logit_softcapping"):
        if config.get(field):
            raise LoadError(f"{file}: {field} is not supported")


def _rope(config: dict[str, Any], gemma: bool) -> tuple[dict[str, Any], float | None]:
    """The rope parameters of full layers, and the base of sliding layers where it is another one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not gemma:
        return rope, None
    local = (rope.get("sliding_attention") or {}).get("rope_theta")
    if "full_attention" in rope:
        rope = rope["full_attention"]
    return rope, local or config.get("rope_local_base_freq") or 10000.0


def _rope_scaling(rope: dict[str, Any], context: int, file: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", need(rope, "factor", file))
    if kind == "llama3":
        fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return RopeScaling("llama3", **{field: need(rope, field, file) for field in fields})
    if kind == "yarn":
        for field in ("mscale", "mscale_all_dim"):
            if rope.get(field):
                raise LoadError(f"{file}: rope field {field!r} is not supported")
        if rope.get("truncate") is False:
            raise LoadError(f"{file}: rope field 'truncate' is not supported unless it is true")
        return yarn_scaling(
            need(rope, "factor", file),
            rope.get("original_max_position_embeddings") or context,
            attention_factor=rope.get("attention_factor"),
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
        )
    raise LoadError(f"{file}: rope type {kind!r} is not supported (default, linear, llama3 and yarn are)")


def yarn_scaling(
    factor: float,
    original: int,
    *,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> RopeScaling:
    """YaRN with its defaults (Peng et al., "YaRN", 2023, sections 3.2 and 3.4)."""
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return RopeScaling("yarn", factor, beta_slow, beta_fast, original, attention_factor)


def _sliding_layers(config: dict[str, Any], architecture: str, layers: int, file: Path) -> tuple[int, ...]:
    types = config.get("layer_types")
    if architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        return ()
    if architecture == "LlamaForCausalLM" or config.get("sliding_window") is None:
        return ()
    if architecture == "MistralForCausalLM":
        return tuple(range(layers))
    if types is None:
        if architecture == "Gemma3ForCausalLM":
            pattern = config.get("sliding_window_pattern") or _GEMMA_PATTERN
            return tuple(layer for layer in range(layers) if (layer + 1) % pattern)
        return tuple(range(need(config, "max_window_layers", file), layers))
    unknown = {*types} - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise LoadError(f"{file}: layer_types names {len(types)} layers of {layers}, or an unknown type")
    return tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The end tokens of config.json and generation_config.json, and the tokenizer's own."""
    ids = _token_ids(config.get("eos_token_id"))
    if (path / "generation_config.json").is_file():
        ids |= _token_ids(read_json(path / "generation_config.json").get("eos_token_id"))
    if (path / "tokenizer_config.json").is_file():
        tokenizer = read_json(path / "tokenizer_config.json")
        eos = tokenizer.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        added = tokenizer.get("added_tokens_decoder", {})
        ids |= {int(token_id) for token_id, token in added.items() if token["content"] == text}
    return tuple(sorted(ids))


def _token_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
