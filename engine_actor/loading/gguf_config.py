"""The model configuration in a GGUF header (keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_actor.loading.config import ModelConfig, RopeScaling, need
from engine_actor.loading.gguf_header import GgufHeader
from engine_actor.loading.hf_config import yarn_scaling
from engine_actor.loading.source import LoadError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

# Markers that end a turn. A GGUF file often names only the end of the text, while its chat template ends
# turns with one of these: generation would run on into an invented user turn.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")

# What the format leaves to the reader, for Gemma 3.
_GEMMA_PATTERN = 6
_GEMMA_LOCAL_THETA = 10000.0
_GEMMA_27B_LAYERS = 62


def gguf_model_config(header: GgufHeader, path: Path) -> ModelConfig:
    """The configuration in an already parsed GGUF header. Raises LoadError as read_model_config does."""
    metadata = header.metadata
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise LoadError(
            f"{path}: GGUF architecture {name!r} is not supported (supported: {', '.join(_ARCHITECTURES)})"
        )
    gemma = name == "gemma3"

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    def required(key: str) -> Any:
        return need(metadata, f"{name}.{key}", path)

    if get("expert_count", 0):
        raise LoadError(f"{path}: mixture-of-experts models are not supported ({name}.expert_count)")
    heads, hidden, layers = (
        required("attention.head_count"),
        required("embedding_length"),
        required("block_count"),
    )
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise LoadError(f"{path}: partial rotary embedding is not supported ({name}.rope.dimension_count)")
    if get("attn_logit_softcapping"):
        raise LoadError(f"{path}: {name}.attn_logit_softcapping is not supported")
    embedding = header.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else len(metadata.get("tokenizer.ggml.tokens", ()))
    context, window = required("context_length"), get("attention.sliding_window") or None
    scaling = _rope_scaling(get, context, path)
    if scaling is not None and scaling.kind == "yarn":
        if gemma:
            raise LoadError(f"{path}: rope scaling 'yarn' is not supported for gemma3")
        context = max(context, int(scaling.factor * scaling.original_max_position_embeddings))
    sliding_layers = tuple(range(layers)) if window else ()
    if gemma and window:
        pattern = get("attention.sliding_window_pattern", _GEMMA_PATTERN)
        sliding = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
        sliding_layers = tuple(layer for layer in range(layers) if sliding[layer])
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        hidden_size=hidden,
        intermediate_size=required("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=get("vocab_size", vocab_size),
        max_position_embeddings=context,
        rope_theta=get("rope.freq_base", 1e6 if gemma else 10000.0),
        rope_scaling=scaling,
        # Stored as float32: 1e-5 reads back as 9.9999997e-06, so round to what was meant.
        rms_norm_eps=float(f"{required('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata),
        weights_dtype="unknown",
        qkv_bias=name == "qwen2",
        qk_norm=name in ("qwen3", "gemma3"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_scalar=hidden / heads if gemma and layers == _GEMMA_27B_LAYERS else None,
        sliding_window=window if sliding_layers else None,
        sliding_layers=sliding_layers,
        local_rope_theta=get("rope.freq_base_swa", _GEMMA_LOCAL_THETA) if gemma else None,
        logit_softcap=get("final_logit_softcapping") if gemma else None,
    )


def _rope_scaling(get: Any, context: int, path: Path) -> RopeScaling | None:
    # The stretched frequencies of Llama 3.1 come as the tensor rope_freqs.weight, not as metadata.
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor")
    if kind == "none":
        return None
    if kind == "linear" and factor:
        return RopeScaling("linear", factor)
    if kind == "yarn" and factor:
        for key in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
            if get(f"rope.scaling.{key}") is not None:
                raise LoadError(f"{path}: rope.scaling.{key} is not supported")
        return yarn_scaling(
            factor,
            get("rope.scaling.original_context_length", context),
            beta_fast=get("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=get("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise LoadError(f"{path}: rope scaling {kind!r} with factor {factor} is not supported")


def _eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = {metadata[key] for key in keys if key in metadata}
    template = metadata.get("tokenizer.chat_template", "")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids.update(tokens.index(marker) for marker in _END_OF_TURN if marker in template and marker in tokens)
    return tuple(sorted(ids))
