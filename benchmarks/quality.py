"""How far an engine's probabilities are from those of the same weights in float32, on a text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import log_softmax

from engine_actor.executor import PAGE_SIZE, Executor
from engine_actor.step import PromptLogprobColumns, SamplingColumns, StepRecord

WINDOW = 512
"""Tokens of text that are seen together."""
CHUNK = 128
PAGES = 2 + WINDOW // PAGE_SIZE
"""Pages that an executor needs, the dummy page included."""

_TEXTS = Path(__file__).parent / "workloads" / "texts.jsonl"
_EVERY = 10


def default_text() -> str:
    """Every tenth of the texts that the workloads are made of: questions, arithmetic and code."""
    lines = _TEXTS.read_text(encoding="utf-8").splitlines()[::_EVERY]
    return "\n\n".join(json.loads(line)["text"] for line in lines)


def quality(
    executor: Executor,
    exact: Executor,
    tokens: list[int],
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """`mean_kl` (nats, from the exact probabilities), `argmax_agreement` and `perplexity`, over all positions of
    windows of 512 tokens; `exact_perplexity` is that of the exact executor."""
    kl: list[torch.Tensor] = []
    agree: list[torch.Tensor] = []
    loss: list[torch.Tensor] = []
    exact_loss: list[torch.Tensor] = []
    for first in range(0, len(tokens), CHUNK):
        window = first // WINDOW * WINDOW
        record = _record(tokens, window, first, min(first + CHUNK, len(tokens)))
        found, expected = (log_softmax(each.execute(record), dim=-1) for each in (executor, exact))
        kl.append((expected.exp() * (expected - found)).sum(dim=-1))
        agree.append(found.argmax(dim=-1) == expected.argmax(dim=-1))
        assert record.prompt_logprobs is not None
        target = torch.from_numpy(record.prompt_logprobs.target.astype(np.int64))
        known = target >= 0
        for losses, logprobs in ((loss, found), (exact_loss, expected)):
            losses.append(-logprobs[known].gather(1, target[known, None])[:, 0])
        progress(min(first + CHUNK, len(tokens)))
    return {
        "tokens": len(tokens),
        "mean_kl": float(torch.cat(kl).mean()),
        "argmax_agreement": float(torch.cat(agree).float().mean()),
        "perplexity": math.exp(torch.cat(loss).mean()),
        "exact_perplexity": math.exp(torch.cat(exact_loss).mean()),
    }


def _record(tokens: list[int], window: int, first: int, last: int) -> StepRecord:
    """Tokens first .. last - 1 of a text whose window begins at `window`, with logits at all of them."""

    def int32(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    following = tokens[first + 1 : min(last + 1, window + WINDOW)]
    pages = -(-(last - window) // PAGE_SIZE)
    return StepRecord(
        epoch=0,
        step=0,
        request=int32(0),
        request_epoch=int32(0),
        start=int32(first - window),
        length=int32(last - first),
        is_last_chunk=np.zeros(1, dtype=np.bool_),
        token_ids=int32(*tokens[first:last]),
        token_indptr=int32(0, last - first),
        page_indices=np.arange(1, pages + 1, dtype=np.int32),
        page_indptr=int32(0, pages),
        sampling=SamplingColumns(
            temperature=np.zeros(0, np.float32),
            top_k=int32(),
            top_p=np.zeros(0, np.float32),
            seed=np.zeros(0, np.uint64),
            position=int32(),
        ),
        prompt_logprobs=PromptLogprobColumns(
            row=int32(0), top=int32(0), target=int32(*following, *[-1] * (last - first - len(following)))
        ),
    )
