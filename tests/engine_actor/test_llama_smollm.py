"""The packaged model against transformers on the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from engine_actor.torch_executor import TorchExecutor

NEAR_TIE = 1e-4


def test_float32_logits_equal_transformers(float32_executor, all_logits, reference, texts) -> None:
    for tokens in texts:
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        assert (all_logits(float32_executor, tokens) - expected).abs().max() < 5e-4


def test_64_greedy_tokens_in_one_batch_equal_transformers(
    float32_executor: TorchExecutor, reference: Any, texts: list[list[int]], make_record, make_row
) -> None:
    """All texts are generated side by side; each token must be transformers' choice, near ties aside."""
    sequences = [list(tokens) for tokens in texts]
    tables = [list(range(1 + 60 * i, 61 + 60 * i)) for i in range(len(texts))]
    record = make_record(*(make_row(tokens, table) for tokens, table in zip(sequences, tables, strict=True)))
    for _ in range(64):
        for tokens, chosen in zip(
            sequences, float32_executor.execute(record).argmax(dim=-1).tolist(), strict=True
        ):
            tokens.append(chosen)
        record = make_record(
            *(
                make_row(tokens[-1:], table, start=len(tokens) - 1)
                for tokens, table in zip(sequences, tables, strict=True)
            )
        )
    for prompt, tokens in zip(texts, sequences, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        for position in range(len(prompt), len(tokens)):
            row = expected[position - 1]
            assert row.max() - row[tokens[position]] < NEAR_TIE, position


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 128])
def test_a_prompt_in_chunks_equals_the_prompt_whole(
    float32_executor: TorchExecutor, texts: list[list[int]], make_record, make_row, chunk: int
) -> None:
    tokens = texts[0][:100]
    whole = float32_executor.execute(make_record(make_row(tokens, range(1, 20))))
    pages = range(100, 120)
    for start in range(0, len(tokens), chunk):
        last = float32_executor.execute(
            make_record(make_row(tokens[start : start + chunk], pages, start=start))
        )
    assert (last - whole).abs().max() < 2e-4


def test_bfloat16_is_no_further_from_float32_than_transformers_own(
    smollm, all_logits: Callable[..., torch.Tensor], reference: Any, texts: list[list[int]]
) -> None:
    executor = TorchExecutor(smollm, dtype="bfloat16", num_pages=64, threads=1)
    text = texts[0] + texts[1]
    with torch.inference_mode():
        exact = log_softmax(reference(torch.tensor([text])).logits[0], dim=-1)
        theirs = copy.deepcopy(reference).bfloat16()(torch.tensor([text])).logits[0].float()

    def divergence(logits: torch.Tensor) -> float:
        return float(
            kl_div(log_softmax(logits, dim=-1), exact, log_target=True, reduction="none").sum(-1).mean()
        )

    assert divergence(all_logits(executor, text)) <= divergence(theirs)
