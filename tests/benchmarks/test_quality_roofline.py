"""`bench quality` and the roofline: known models, known counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.quality import PAGES, default_text, quality
from benchmarks.roofline import Roofline
from engine_actor.executor import Executor, ExecutorInfo
from engine_actor.loading.config import ModelConfig
from engine_actor.native.ceilings import Ceilings
from engine_actor.step import SamplingColumns, StepRecord

VOCAB = 7


class Table(Executor):
    """Logits that depend on a token, its position and nothing else; remembers the records."""

    def __init__(self, scale: float = 1.0) -> None:
        self.info = ExecutorInfo("table", "none", "cpu", "float32", "none", 1)
        self.num_pages = PAGES
        self.scale = scale
        self.records: list[StepRecord] = []

    def logits(self, token: int, position: int) -> torch.Tensor:
        return self.scale * torch.sin(torch.arange(VOCAB) * (token + 1.0) + position)

    def execute(self, record: StepRecord) -> torch.Tensor:
        self.records.append(record)
        start = int(record.start[0])
        return torch.stack([self.logits(int(t), start + i) for i, t in enumerate(record.token_ids)])


def test_quality_over_windows_and_chunks() -> None:
    tokens = [(i * i) % VOCAB for i in range(700)]
    exact, other = Table(), Table(0.5)
    figures = quality(other, exact, tokens)
    expected = torch.stack([exact.logits(token, i % 512) for i, token in enumerate(tokens)]).log_softmax(-1)
    found = torch.stack([other.logits(token, i % 512) for i, token in enumerate(tokens)]).log_softmax(-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    assert figures["mean_kl"] == pytest.approx(float(kl), rel=1e-4)
    assert figures["argmax_agreement"] == 1.0
    known = [i for i in range(699) if i != 511]  # the token behind a window is not predicted
    target = torch.tensor([tokens[i + 1] for i in known])
    assert figures["perplexity"] == pytest.approx(float(cross_entropy(found[known], target).exp()), rel=1e-4)
    assert figures["exact_perplexity"] != figures["perplexity"]
    spans = [(int(r.start[0]), int(r.length[0]), len(r.page_indices)) for r in exact.records]
    assert spans == [(0, 128, 8), (128, 128, 16), (256, 128, 24), (384, 128, 32), (0, 128, 8), (128, 60, 12)]


def test_an_engine_against_itself_differs_in_nothing() -> None:
    figures = quality(Table(), Table(), list(range(VOCAB)))
    assert (figures["mean_kl"], figures["argmax_agreement"], figures["tokens"]) == (0.0, 1.0, VOCAB)


def test_the_fixed_text_is_long_enough_to_say_something() -> None:
    assert len(default_text().split()) > 1000


def test_mistakes_of_bench_quality_are_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (["--engine", "stub"], "the stub has no model"),
        (["--text", str(tmp_path / "none.txt")], "none.txt: cannot be read"),
    ):
        result = CliRunner().invoke(app, ["quality", "--json", *arguments])
        assert result.exit_code == 1 and result.stdout == ""
        assert message in result.stderr


def model() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        max_position_embeddings=512,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        weights_dtype="bfloat16",
    )


def step(start: list[int], length: list[int], is_last_chunk: list[bool]) -> StepRecord:
    """A record in which only what is counted is filled in."""
    empty = np.zeros(0, np.int32)
    return StepRecord(
        epoch=0,
        step=0,
        request=np.arange(len(start), dtype=np.int32),
        request_epoch=np.zeros(len(start), np.int32),
        start=np.array(start, np.int32),
        length=np.array(length, np.int32),
        is_last_chunk=np.array(is_last_chunk),
        token_ids=np.zeros(sum(length), np.int32),
        token_indptr=np.cumsum([0, *length]).astype(np.int32),
        page_indices=empty,
        page_indptr=empty,
        sampling=SamplingColumns(
            empty.astype(np.float32), empty, empty.astype(np.float32), empty.astype(np.uint64), empty
        ),
    )


@pytest.mark.parametrize(
    ("quantization", "layer_bytes", "output_bytes", "speed"),
    [("none", 2, 2, 1e12), ("int8", 1, 1, 2e12), ("int4", 0.625, 1, 2e12)],
)
def test_roofline_counts(quantization: str, layer_bytes: float, output_bytes: int, speed: float) -> None:
    ceilings = Ceilings(bf16_operations=1e12, int8_operations=2e12, memory_bytes=1e9)
    # A prompt of 3 tokens, whose logits nobody needs, and a decode row that sees 21 tokens.
    record = step(start=[0, 20], length=[3, 1], is_last_chunk=[False, True])
    weights = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128)
    sizes = (int(weights * layer_bytes), 100 * 64 * output_bytes)
    work = Roofline(model(), quantization, ceilings, sizes).step(record)
    if quantization == "none":
        assert Roofline(model(), quantization, ceilings).step(record) == work
    assert work.linear_operations == 2 * (4 * weights + 100 * 64)
    assert work.attention_operations == 4 * 64 * 2 * (1 + 2 + 3 + 21)
    kv = 2 * 2 * 32 * 2  # of one token: keys and values of two layers
    assert work.bytes == weights * layer_bytes + 100 * 64 * output_bytes + (3 + 21 + 4) * kv
    assert work.limit_seconds == work.bytes / 1e9  # few tokens: memory is the limit
    fast = Roofline(model(), quantization, Ceilings(1e12, 2e12, 1e15), sizes).step(record)
    assert fast.limit_seconds == pytest.approx(
        work.linear_operations / speed + work.attention_operations / 1e12
    )
    report = Roofline(model(), quantization, ceilings, sizes).report(
        [record, record], 4 * work.limit_seconds, 2
    )
    assert report["fraction"] == 0.5
    compute = work.linear_operations / speed + work.attention_operations / 1e12
    assert report["compute_fraction"] == round(compute / (2 * work.limit_seconds), 3)
    assert report["limit_output_tokens_per_s"] == round(1 / work.limit_seconds, 1)
    json.dumps(report)
