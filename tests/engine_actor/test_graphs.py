"""Graphs of decode steps, captured with a stand-in that records the work and runs it again on replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_flashinfer import FakeFlashInfer
from test_attention_flashinfer import make_backend
from test_attention_reference import HEAD_DIM, HEADS, KV_HEADS

from engine_actor.graphs import DecodeGraphs, graph_sizes

VOCAB = HEADS * HEAD_DIM


class TinyModel:
    """A one-layer stand-in: q, k and v depend on token and position, the logits are the attention's output."""

    def __init__(self, backend) -> None:
        self._backend = backend
        generator = torch.Generator().manual_seed(0)
        self._weights = [
            torch.randn(50, heads, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.calls = 0

    def __call__(self, token_ids, positions, logit_tokens, metadata) -> torch.Tensor:
        self.calls += 1
        q, k, v = (
            (weight[token_ids] * (1 + positions[:, None, None] / 64)).bfloat16() for weight in self._weights
        )
        return self._backend.forward(0, q, k, v, metadata).flatten(1)[logit_tokens].float()


@pytest.fixture
def fake() -> FakeFlashInfer:
    return FakeFlashInfer()


def make_graphs(fake: FakeFlashInfer, max_rows: int = 12) -> tuple[DecodeGraphs, TinyModel, list[int]]:
    backend = make_backend(fake)
    model = TinyModel(backend)
    captured: list[int] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        fake.capturing = True
        work()
        fake.capturing = False
        captured.append(model.calls)
        return work

    graphs = DecodeGraphs(
        model, backend, max_rows=max_rows, max_model_len=64, vocab_size=VOCAB, capture=capture
    )
    return graphs, model, captured


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 4]
    assert graph_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_sizes(33)[-1] == 40
    assert graph_sizes(1000)[-1] == 256 and len(graph_sizes(1000)) == 35


def test_replayed_steps_equal_eager_ones(fake, make_record, make_row) -> None:
    """Rows come and go, so that a padded size is used again after a larger step left its values in the buffers; every
    other step takes its tokens from the step before."""
    graphs, model, captured = make_graphs(fake)
    eager = TinyModel(make_backend(fake))
    assert (graphs.counters.captured, len(captured)) == (5, 5)
    tables = [[3, 50], [9], [21, 2], [60, 5], [40], [11], [12]]
    starts = [17, 1, 30, 16, 0, 4, 5]
    prompt = make_record(*(make_row([7] * n, t) for n, t in zip(starts, tables, strict=True) if n))
    for one in (model, eager):
        metadata = one._backend.prepare(prompt)
        tokens = torch.from_numpy(prompt.token_ids).long()
        one(tokens, tokens * 0 + 3, torch.arange(1), metadata)
    for number, rows in enumerate([range(7), range(3), range(2, 7), range(1), range(5, 7)]):
        record = make_record(*(make_row([(5 * r + number) % 50], tables[r], start=starts[r]) for r in rows))
        unknown = replace(record, token_ids=-1 - np.arange(record.num_rows, dtype=np.int32)[::-1])
        sampled = torch.from_numpy(record.token_ids[::-1].copy())
        got = graphs.execute(unknown, sampled) if number % 2 else graphs.execute(record)
        expected = eager(
            torch.from_numpy(record.token_ids).long(),
            torch.from_numpy(record.start).long(),
            torch.arange(record.num_rows),
            eager._backend.prepare(record),
        )
        assert got is not None and torch.equal(got, expected), number
        for r in rows:
            starts[r] += 1
    assert graphs.counters.replays == 5 and graphs.counters.eager_steps == 0


def test_other_steps_are_left_to_the_eager_path(fake, make_record, make_row) -> None:
    graphs, _, _ = make_graphs(fake, max_rows=2)
    assert graphs.execute(make_record(make_row([1, 2], [3]))) is None
    assert graphs.execute(make_record(make_row([1], [3], more=True))) is None
    assert graphs.execute(make_record(*(make_row([1], [3 + i]) for i in range(3)))) is None
    assert (graphs.counters.eager_steps, graphs.counters.replays) == (3, 0)
    assert graphs.counters.capture_seconds > 0


def test_the_page_table_may_be_as_long_as_the_context(fake, make_record, make_row) -> None:
    graphs, _, _ = make_graphs(fake, max_rows=1)
    assert graphs.execute(make_record(make_row([1], [3, 4, 5, 6], start=63))) is not None


def test_a_whole_model_under_graphs_equals_the_reference(
    fake, tmp_path, monkeypatch, make_record, make_row
) -> None:
    """The executor as on a GPU, with FlashInfer's and the graphs' stand-ins: prefill eager, decode replayed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine_actor import graphs, torch_executor
    from engine_actor.attention.flashinfer import FlashInferBackend
    from engine_actor.loading.checkpoint import load_checkpoint
    from engine_actor.torch_executor import TorchExecutor

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=80, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    expected = TorchExecutor(checkpoint, num_pages=16, threads=1)
    assert expected.graphs is None

    def select(choice, shape, *, num_pages, dtype, device):
        backend = FlashInferBackend(
            fake, num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, num_pages=num_pages, dtype=dtype, device=device, make_event=fake.make_event,
        )  # fmt: skip
        return backend, None

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        fake.capturing = True
        work()
        fake.capturing = False
        return work

    monkeypatch.setattr(torch_executor, "select_attention", select)
    monkeypatch.setattr(graphs, "cuda_graph_capture", lambda: capture)
    executor = TorchExecutor(checkpoint, num_pages=16, threads=1, graph_rows=4)
    assert executor.info.attention_backend == "flashinfer"
    assert executor.graphs is not None and executor.graphs.captured == 3
    tables = [[3, 5], [7], [1, 2]]
    steps = [
        make_record(make_row([5] * 17, tables[0]), make_row([9, 8], tables[1])),
        make_record(make_row([6], tables[0], start=17), make_row(list(range(30)), tables[2])),
        make_record(
            make_row([1], tables[0], start=18),
            make_row([2], tables[1], start=2),
            make_row([3], tables[2], start=30),
        ),
        make_record(make_row([4], tables[1], start=3)),
    ]
    for record in steps:
        assert (executor.execute(record) - expected.execute(record)).abs().max() < 0.15
    assert (executor.graphs.replays, executor.graphs.eager_steps) == (2, 2)
