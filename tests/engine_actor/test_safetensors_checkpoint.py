"""Hugging Face directories: random models against transformers, and every way to be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_actor.loading.checkpoint import load_checkpoint
from engine_actor.loading.config import ModelConfig
from engine_actor.loading.read_config import read_model_config
from engine_actor.loading.source import LoadError, ResolvedSource
from engine_actor.torch_executor import TorchExecutor

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def save_model(directory: Path, *, family: str = "Llama", shard_size: str = "1GB", **options: Any) -> Any:
    """A random model in a directory, as transformers saves it; returns the model."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{family}Config")(**(settings | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not None}))


def load_error(directory: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load_checkpoint(str(directory))
    return str(caught.value)


def config_of(directory: Path) -> ModelConfig:
    return read_model_config(ResolvedSource("hf", directory))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"shard_size": "40KB"},
        {"shard_size": "40KB", "tie_word_embeddings": True, "num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 32},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"rope_parameters": LLAMA3},
        {"family": "Mistral", "sliding_window": None},
    ],
    ids=[
        "untied",
        "tied",
        "sharded",
        "sharded-tied-mqa",
        "mha",
        "head_dim",
        "rope_theta",
        "rope_linear",
        "rope_llama3",
        "mistral",
    ],
)
def test_logits_equal_transformers(tmp_path: Path, make_record, make_row, options: dict[str, Any]) -> None:
    model = save_model(tmp_path, **options)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded is ("shard_size" in options)
    executor = TorchExecutor(load_checkpoint(str(tmp_path)), dtype="float32", num_pages=32, threads=1)
    tokens = torch.randint(0, 96, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    pages = [5, 9, 2, 30, 11, 4, 3, 17, 18, 1]
    for start, end in ((0, 40), (40, 41), (41, 97), (97, 150)):
        logits = executor.execute(make_record(make_row(tokens[start:end], pages, start=start)))
        assert (logits[0] - expected[end - 1]).abs().max() < 1e-4, end


def test_old_configuration_fields_are_read(tmp_path: Path) -> None:
    save_model(tmp_path)
    edit_json(
        tmp_path / "config.json",
        rope_parameters=None,
        rope_theta=1234.0,
        rope_scaling={"type": "linear", "factor": 2.0},
        dtype=None,
        torch_dtype="bfloat16",
    )
    config = config_of(tmp_path)
    assert config.rope_theta == 1234.0 and config.weights_dtype == "bfloat16"
    assert config.rope_scaling is not None and config.rope_scaling.factor == 2.0


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, shard_size="40KB")
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    assert victim.name in load_error(tmp_path)


def test_shards_without_index_or_behind_its_back_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, shard_size="40KB")
    save_file({"x": torch.zeros(1)}, tmp_path / "model-00099-of-00099.safetensors")
    assert "model-00099-of-00099.safetensors" in load_error(tmp_path)
    (tmp_path / "model-00099-of-00099.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    message = load_error(tmp_path)
    assert "model.safetensors.index.json" in message and "model-00001-of" in message


def test_an_index_that_points_to_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]
    shards = list(names.values())
    moved, shard = next((name, shard) for name, shard in names.items() if shards.count(shard) > 1)
    names[moved] = next(other for other in shards if other != shard)
    index.write_text(json.dumps(content))
    assert moved in load_error(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors" in load_error(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors: not readable" in load_error(tmp_path)


@pytest.mark.parametrize(
    ("name", "replacement", "expected"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "missing: model.layers.1.mlp.up_proj.weight"),
        (
            "model.layers.0.self_attn.q_proj.bias",
            torch.zeros(64),
            "unknown: model.layers.0.self_attn.q_proj.bias",
        ),
        ("model.norm.weight", torch.zeros(65), "wrong shape: model.norm.weight is [65], expected [64]"),
        ("model.embed_tokens.weight", torch.zeros(97, 64), "wrong shape: model.embed_tokens.weight"),
        ("lm_head.weight", None, "tie_word_embeddings=false"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, replacement: Any, expected: str
) -> None:
    save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name, None)
    if replacement is not None:
        tensors[name] = replacement
    save_file(tensors, tmp_path / "model.safetensors")
    assert expected in load_error(tmp_path)


def test_a_copy_of_tied_embeddings_passes_and_another_output_layer_does_not(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load_checkpoint(str(tmp_path))
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert "tie_word_embeddings=true" in load_error(tmp_path)


def test_stored_frequencies_are_ignored(tmp_path: Path) -> None:
    save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    load_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported (supported: LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture none is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "(awq)"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "'mscale'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'factor' is missing"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_key_value_heads": 3}, "4 heads can not share 3"),
    ],
)
def test_unsupported_configurations_are_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    save_model(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    assert expected in load_error(tmp_path)


def test_a_configuration_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not readable as JSON" in load_error(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "config.json: not a JSON object" in load_error(tmp_path)


def test_end_tokens_of_all_files_count(tmp_path: Path) -> None:
    save_model(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").unlink()
    assert config_of(tmp_path).eos_token_ids == (2,)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[7, 2, 9])
    assert config_of(tmp_path).eos_token_ids == (2, 7, 9)
    edit_json(
        tmp_path / "tokenizer_config.json",
        eos_token={"content": "<|end|>"},
        added_tokens_decoder={"5": {"content": "<|end|>"}, "6": {"content": "<|start|>"}},
    )
    assert config_of(tmp_path).eos_token_ids == (2, 5, 7, 9)
