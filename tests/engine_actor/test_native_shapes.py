"""The native executor on models of any shape: random sizes, families, thread counts and batches against torch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.config import ModelConfig
from engine_actor.loading.source import ResolvedSource
from engine_actor.native import build
from engine_actor.native.build import NativeUnavailable
from engine_actor.native.executor import NativeExecutor
from engine_actor.native.probe import RandomWeights
from engine_actor.torch_executor import TorchExecutor

TOLERANCES = {"none": 0.06, "int8": 0.15, "int4": 0.6}
FAMILIES: tuple[dict[str, Any], ...] = (
    {},
    {"qkv_bias": True},
    {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
    {
        "architecture": "Gemma3ForCausalLM",
        "qk_norm": True,
        "post_norms": True,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": 4.0,
        "sliding_window": 21,
        "sliding_layers": (0,),
        "local_rope_theta": 1000.0,
        "tie_word_embeddings": True,
    },
)


@pytest.fixture(params=build.INSTRUCTION_SETS, ids=lambda instructions: instructions.name)
def _instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "INSTRUCTION_SETS", (request.param,))
    try:
        build.load_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def random_model(rng: random.Random, quantization: str) -> ModelConfig:
    step = 16 if quantization == "none" else 64
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7, 8])
    head_dim = rng.choice([16, 32, 48, 64, 80, 96, 112, 128, 144, 256])
    if kv_heads * group * head_dim % step:
        head_dim = 64
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "hidden_size": step * rng.randint(1, 5),
        "intermediate_size": step * rng.randint(1, 9),
        "num_layers": rng.randint(1, 3),
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": rng.randint(2, 200),
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": None,
        "eos_token_ids": (),
        "weights_dtype": "bfloat16",
    }
    return ModelConfig(**(fields | rng.choice(FAMILIES)))


def check_model(make_record: Any, make_row: Any, seed: int) -> None:
    rng = random.Random(seed)
    quantization = rng.choice(["none", "none", "int8", "int4"])
    model, num_pages = random_model(rng, quantization), rng.choice([45, 5000])
    checkpoint = Checkpoint(model, ResolvedSource("hf", Path()), RandomWeights(model, seed))
    limits: dict[str, Any] = {"num_pages": num_pages, "quantization": quantization}
    native = NativeExecutor(checkpoint, threads=rng.randint(1, 8), **limits)
    exact = TorchExecutor(checkpoint, dtype="float32", num_pages=num_pages, threads=1)
    pages = rng.sample(range(1, num_pages), 40)
    tokens = [rng.randrange(model.vocab_size) for _ in range(rng.choice([1, 2, 16, 17, 65, 150]))]
    alone = make_record(make_row(tokens, pages[:10]))
    whole = native.execute(alone).clone()
    expected = exact.execute(alone)
    assert (whole - expected).norm() < TOLERANCES[quantization] * expected.norm(), (seed, model)

    start = 0
    while start < len(tokens):
        length = rng.choice([1, 3, 16, 40, 150])
        chunk = make_row(tokens[start : start + length], pages[10:20], start=start)
        others = [
            make_row([rng.randrange(model.vocab_size)] * rng.choice([1, 7, 30]), pages[at : at + 5])
            for at in range(20, 20 + 5 * rng.randint(0, 4), 5)
        ]
        batched = make_record(chunk, *others)
        last = native.execute(batched)[0].clone()
        start += length
    assert torch.equal(last, whole[0]), (seed, model)
    one_thread = NativeExecutor(checkpoint, threads=1, **limits)
    assert torch.equal(one_thread.execute(alone), whole), (seed, model)
    greedy = native.execute_greedy(batched)
    if greedy is not None:
        assert greedy.tolist() == native.execute(batched).argmax(1).tolist(), (seed, model)


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("seed", range(12))
def test_a_model_of_a_random_shape(make_record: Any, make_row: Any, seed: int) -> None:
    check_model(make_record, make_row, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_instructions")
def test_hundreds_of_models_of_random_shapes(make_record: Any, make_row: Any) -> None:
    for seed in range(100, 500):
        check_model(make_record, make_row, seed)
