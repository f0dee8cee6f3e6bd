"""The torch executor as the engine drives it: any mix of rows, options, threads."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_actor.loading.checkpoint import Checkpoint, load_checkpoint
from engine_actor.models import layers
from engine_actor.models.layers import make_linear, packed_bfloat16_available
from engine_actor.torch_executor import TorchExecutor

VOCAB = 80


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory: Path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    return load_checkpoint(str(directory))


@pytest.fixture(params=["float32", "bfloat16"])
def executor(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> TorchExecutor:
    return TorchExecutor(checkpoint, dtype=request.param, num_pages=64, threads=1)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def close(a: torch.Tensor, b: torch.Tensor, executor: TorchExecutor) -> bool:
    return bool((a - b).abs().max() < (1e-4 if executor.info.dtype == "float32" else 0.15))


def test_any_mix_of_rows_equals_each_request_alone(executor: TorchExecutor, make_record, make_row) -> None:
    prompts = [prompt(n, n) for n in (40, 1, 17, 3)]
    alone = [executor.execute(make_record(make_row(tokens, range(1, 10)))) for tokens in prompts]
    tables = [[11, 12, 13], [14], [15, 16], [17]]
    executor.execute(  # first parts: a chunk, a chunk that ends on a page, nothing of the others
        make_record(
            make_row(prompts[0][:39], tables[0], more=True), make_row(prompts[2][:16], tables[2], more=True)
        )
    )
    rest = [(39, 40), (0, 1), (16, 17), (0, 3)]
    logits = executor.execute(
        make_record(
            *(make_row(prompts[i][start:end], tables[i], start=start) for i, (start, end) in enumerate(rest))
        )
    )
    assert logits.shape == (4, VOCAB) and logits.dtype == torch.float32
    for row, expected in zip(logits, alone, strict=True):
        assert close(row, expected[0], executor)


def test_only_rows_that_end_get_logits_in_row_order(executor: TorchExecutor, make_record, make_row) -> None:
    first, second, third = prompt(20, 1), prompt(5, 2), prompt(9, 3)
    logits = executor.execute(
        make_record(make_row(first[:10], [1, 2], more=True), make_row(second, [3]), make_row(third, [4]))
    )
    assert logits.shape == (2, VOCAB)
    assert close(logits[0], executor.execute(make_record(make_row(second, [9])))[0], executor)
    assert close(logits[1], executor.execute(make_record(make_row(third, [9])))[0], executor)


def test_a_step_without_logits_and_an_empty_step(executor: TorchExecutor, make_record, make_row) -> None:
    assert executor.execute(make_record(make_row(prompt(7, 1), [1], more=True))).shape == (0, VOCAB)
    assert executor.execute(make_record()).shape == (0, VOCAB)


def test_a_cached_prefix_is_used_as_if_computed(executor: TorchExecutor, make_record, make_row) -> None:
    shared, tails = prompt(32, 5), [prompt(6, 6), prompt(1, 7)]
    executor.execute(make_record(make_row(shared, [20, 21], more=True)))
    logits = executor.execute(
        make_record(*(make_row(tail, [20, 21, 30 + i], start=32) for i, tail in enumerate(tails)))
    )
    for row, tail in zip(logits, tails, strict=True):
        expected = executor.execute(make_record(make_row(shared + tail, [1, 2, 3])))[0]
        assert close(row, expected, executor)


def test_reused_pages_show_nothing_of_their_former_owner(
    executor: TorchExecutor, make_record, make_row
) -> None:
    tokens = prompt(21, 8)
    before = executor.execute(make_record(make_row(tokens, [1, 2])))
    executor.execute(make_record(make_row(prompt(32, 9), [1, 2])))
    assert torch.equal(executor.execute(make_record(make_row(tokens, [1, 2]))), before)


def test_an_executor_built_in_one_thread_runs_in_another(
    checkpoint: Checkpoint, make_record, make_row
) -> None:
    """Engines load in one thread and step in another: the thread count and inference mode go along."""
    executor = TorchExecutor(checkpoint, dtype="float32", num_pages=8, threads=1)
    record = make_record(make_row(prompt(9, 1), [1]))
    here = executor.execute(record)
    torch.set_num_threads(2)
    seen: list[Any] = []

    def step() -> None:
        seen.extend([executor.execute(record), torch.get_num_threads()])

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert torch.equal(seen[0], here) and seen[1] == 1
    assert executor.info.threads == 1


def test_the_pool_is_sized_by_pages_or_by_memory(checkpoint: Checkpoint) -> None:
    # 2 (K, V) x 3 layers x 2 heads x 16 dims x 16 tokens x 4 bytes = 12,288 bytes a page.
    assert TorchExecutor(checkpoint, dtype="float32", kv_memory_bytes=12_288 * 5 + 1).num_pages == 5
    assert TorchExecutor(checkpoint, dtype="bfloat16", kv_memory_bytes=12_288 * 5 + 1).num_pages == 10
    assert TorchExecutor(checkpoint, dtype="float32", num_pages=2).num_pages == 2
    for options in (
        {},
        {"num_pages": 4, "kv_memory_bytes": 1 << 20},
        {"num_pages": 1},
        {"kv_memory_bytes": 100},
    ):
        with pytest.raises(ValueError, match="page"):
            TorchExecutor(checkpoint, dtype="float32", **options)


def test_types(checkpoint: Checkpoint, make_record, make_row) -> None:
    with pytest.raises(ValueError, match="'int8' is not supported"):
        TorchExecutor(checkpoint, dtype="int8", num_pages=4)
    with pytest.warns(UserWarning) as caught:
        half = TorchExecutor(checkpoint, dtype="float16", num_pages=4)
    assert any("slow on a CPU" in str(w.message) for w in caught)
    assert any("may overflow" in str(w.message) for w in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full = TorchExecutor(checkpoint, dtype="float32", num_pages=4)
    record = make_record(make_row(prompt(9, 1), [1]))
    assert (half.execute(record) - full.execute(record)).abs().max() < 0.02


def test_info_says_what_runs(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    info = TorchExecutor(checkpoint, dtype="float32", num_pages=4, threads=1).info
    assert (info.executor, info.attention_backend, info.device, info.dtype) == (
        "torch",
        "reference",
        "cpu",
        "float32",
    )
    assert info.fallback_reason is None
    monkeypatch.setattr("engine_actor.torch_executor.packed_bfloat16_available", lambda: False)
    reason = TorchExecutor(checkpoint, dtype="bfloat16", num_pages=4, threads=1).info.fallback_reason
    assert reason is not None and "oneDNN" in reason


@pytest.mark.skipif(not packed_bfloat16_available(), reason="oneDNN has no packed bfloat16 here")
@pytest.mark.parametrize("rows", [1, 3, 64, 300])
def test_packed_and_plain_linear_layers_agree(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    with torch.inference_mode():
        packed = make_linear(weight)(x)
        monkeypatch.setattr(layers, "packed_bfloat16_available", lambda: False)
        plain = make_linear(weight)(x)
    exact = x.double() @ weight.double().T
    assert packed.dtype == plain.dtype == torch.bfloat16
    for result in (packed, plain):
        assert ((result.double() - exact).abs() <= exact.abs() / 128 + 0.05).all()
