"""The model configuration, read from a Hugging Face directory or a GGUF header. No torch: the gateway reads
it too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_actor.loading.gguf_header import GgufHeader, read_gguf_header
from engine_actor.loading.source import LoadError, ResolvedSource

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

# Markers that end a turn. A GGUF file often names only the end of the text, while its chat template ends
# turns with one of these: generation would run on into an invented user turn.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: kind "linear" uses `factor` alone, "llama3" all four."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. `architecture` is the Hugging Face class name.

    `max_position_embeddings` is the longest context that is computed exactly as the model defines it: a
    sliding window caps it. `eos_token_ids` holds every configured end token, ascending. `weights_dtype` is
    the type that the weights were made in, "unknown" where the checkpoint does not say.
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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"{self.num_heads} heads can not share {self.num_kv_heads} key/value heads evenly"
            )


def read_model_config(resolved: ResolvedSource) -> ModelConfig:
    """Read the configuration without touching the weights.

    Raises LoadError for a missing or damaged file or field, an unsupported architecture or an option that
    would change the computation and is not implemented.
    """
    if resolved.kind == "gguf":
        return gguf_model_config(read_gguf_header(resolved.path), resolved.path)
    return _hf_model_config(resolved.path)


def gguf_model_config(header: GgufHeader, path: Path) -> ModelConfig:
    """The configuration in an already parsed GGUF header."""
    metadata = header.metadata
    name = metadata.get("general.architecture")
    if name not in _GGUF_ARCHITECTURES:
        raise LoadError(
            f"{path}: GGUF architecture {name!r} is not supported "
            f"(supported: {', '.join(_GGUF_ARCHITECTURES)})"
        )

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    def need(key: str) -> Any:
        return _need(metadata, f"{name}.{key}", path)

    if get("expert_count", 0):
        raise LoadError(f"{path}: mixture-of-experts models are not supported ({name}.expert_count)")
    heads = need("attention.head_count")
    head_dim = get("attention.key_length", need("embedding_length") // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise LoadError(f"{path}: partial rotary embedding is not supported ({name}.rope.dimension_count)")
    embedding = header.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else len(metadata.get("tokenizer.ggml.tokens", ()))
    context = need("context_length")
    return ModelConfig(
        architecture=_GGUF_ARCHITECTURES[name],
        hidden_size=need("embedding_length"),
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=get("vocab_size", vocab_size),
        max_position_embeddings=min(context, get("attention.sliding_window") or context),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(get("rope.scaling.type", "none"), get("rope.scaling.factor"), path),
        # Stored as float32: 1e-5 reads back as 9.9999997e-06, so round to what was meant.
        rms_norm_eps=float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_gguf_eos_token_ids(metadata),
        weights_dtype="unknown",
    )


def _gguf_rope_scaling(kind: str, factor: float | None, path: Path) -> RopeScaling | None:
    # The stretched frequencies of Llama 3.1 come as the tensor rope_freqs.weight, not as metadata.
    if kind == "none":
        return None
    if kind == "linear" and factor:
        return RopeScaling("linear", factor)
    raise LoadError(f"{path}: rope scaling {kind!r} with factor {factor} is not supported")


def _gguf_eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = {metadata[key] for key in keys if key in metadata}
    template = metadata.get("tokenizer.chat_template", "")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids.update(tokens.index(marker) for marker in _END_OF_TURN if marker in template and marker in tokens)
    return tuple(sorted(ids))


def _hf_model_config(path: Path) -> ModelConfig:
    file = path / "config.json"
    config = read_json(file)
    architectures = config.get("architectures") or ["none"]
    architecture = next((name for name in architectures if name in SUPPORTED_ARCHITECTURES), None)
    if architecture is None:
        raise LoadError(
            f"{file}: architecture {', '.join(architectures)} is not supported "
            f"(supported: {', '.join(SUPPORTED_ARCHITECTURES)})"
        )
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise LoadError(f"{file}: quantised safetensors ({method}) are not supported")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise LoadError(f"{file}: attention_bias and mlp_bias are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{file}: hidden_act {config['hidden_act']!r} is not supported")
    heads = _need(config, "num_attention_heads", file)
    hidden_size = _need(config, "hidden_size", file)
    context = _need(config, "max_position_embeddings", file)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    dtype = config.get("dtype") or config.get("torch_dtype") or "unknown"
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_need(config, "intermediate_size", file),
        num_layers=_need(config, "num_hidden_layers", file),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden_size // heads,
        vocab_size=_need(config, "vocab_size", file),
        max_position_embeddings=min(context, config.get("sliding_window") or context),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        rope_scaling=_hf_rope_scaling(rope, file),
        rms_norm_eps=_need(config, "rms_norm_eps", file),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_hf_eos_token_ids(path, config),
        weights_dtype=dtype,
    )


def _hf_rope_scaling(rope: dict[str, Any], file: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", _need(rope, "factor", file))
    if kind == "llama3":
        fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return RopeScaling("llama3", **{field: _need(rope, field, file) for field in fields})
    raise LoadError(f"{file}: rope type {kind!r} is not supported (default, linear and llama3 are)")


def _hf_eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
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


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises LoadError naming the file when it is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise LoadError(f"{file}: not a JSON object")
    return content


def _need(mapping: dict[str, Any], key: str, file: Path) -> Any:
    if mapping.get(key) is None:
        raise LoadError(f"{file}: field {key!r} is missing")
    return mapping[key]
