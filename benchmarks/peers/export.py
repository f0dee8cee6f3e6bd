"""The default model as other engines want it: a Hugging Face directory with the weights that ours computes with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine_actor.loading.checkpoint import load_checkpoint
from engine_actor.loading.source import resolve_source
from serve_app.text.load import load_tokenizer


def export(source: str, directory: Path) -> None:
    """Write config.json, model.safetensors in bfloat16 and tokenizer.json, of a Llama model without rope scaling.

    Raises ValueError for another model: this is for the comparison, not a converter.
    """
    checkpoint = load_checkpoint(source)
    config = checkpoint.config
    if config.architecture != "LlamaForCausalLM" or config.rope_scaling is not None:
        raise ValueError(f"only plain Llama models are exported, not {config.architecture}")
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: checkpoint.weights.read(name).to(torch.bfloat16).contiguous().clone()
        for name in checkpoint.weights.shapes
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_act": "silu",
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "vocab_size": config.vocab_size,
                "max_position_embeddings": config.max_position_embeddings,
                "rope_theta": config.rope_theta,
                "rms_norm_eps": config.rms_norm_eps,
                "tie_word_embeddings": config.tie_word_embeddings,
                "bos_token_id": config.bos_token_id,
                "eos_token_id": list(config.eos_token_ids),
                "torch_dtype": "bfloat16",
            },
            indent=1,
        )
    )
    tokenizer = load_tokenizer(resolve_source(source))
    tokenizer.save(directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
