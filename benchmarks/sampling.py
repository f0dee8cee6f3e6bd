"""What sampling costs, per row and setting: from the wishes of requests to tokens, without a model.

Probabilities fall with the rank as they do in text; those of "flat" settings hardly fall, the worst case for top_p.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from engine_actor.request import EngineRequest, SamplingParams
from engine_actor.sampling.logprobs import token_logprobs
from engine_actor.sampling.sampler import sample
from engine_actor.sampling.state import SamplingState, with_wishes
from engine_actor.step import SamplingColumns

HISTORY = 500
"""Tokens of prompt and output each that a row with penalties has behind it."""

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "top_k 40": {"top_k": 40},
    "top_p 0.9": {"top_p": 0.9},
    "flat, top_p 0.9": {"top_p": 0.9},
    "top_k 40, top_p 0.9": {"top_k": 40, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "greedy, penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "greedy, logit_bias of 100": {"temperature": 0.0, "logit_bias": tuple((i, 1.0) for i in range(100))},
    "greedy, logprobs 0": {"temperature": 0.0, "logprobs": 0},
    "greedy, top_logprobs 20": {"temperature": 0.0, "logprobs": 20},
}


def run(rows: int, vocab: int, repeat: int) -> dict[str, dict[str, float]]:
    """For each setting `us_per_row`, when all rows have it, and `ratio` to greedy; the fastest of `repeat` rounds.

    CPU time of one thread. The rounds go through the settings in turn, so that a busy machine slows all alike.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rank = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
    peaked = -1.5 * torch.log(rank + 1.0)  # by rank as in text (Zipf): 60 tokens hold nine tenths
    flat = torch.randn(rows, vocab, generator=generator)
    states = {name: [_state(row, vocab, params) for row in range(rows)] for name, params in SETTINGS.items()}
    best = dict.fromkeys(SETTINGS, float("inf"))
    for _ in range(repeat):
        for name, params in SETTINGS.items():
            copy = (
                flat if name.startswith("flat") else peaked
            ).clone()  # as the executor makes new ones each step
            begin = time.thread_time()
            _step(copy, SamplingParams(1, **({"temperature": 1.0} | params)), states[name])
            best[name] = min(best[name], time.thread_time() - begin)
    return {
        name: {"us_per_row": seconds / rows * 1e6, "ratio": seconds / best["greedy"]}
        for name, seconds in best.items()
    }


def _state(row: int, vocab: int, params: dict[str, Any]) -> SamplingState | None:
    tokens = np.random.default_rng(row).integers(0, vocab, 2 * HISTORY).tolist()
    request = EngineRequest("r", 1, "r", "t", tokens[:HISTORY], SamplingParams(1, **params))
    state = SamplingState.of(request)
    if state is not None:
        for token in tokens[HISTORY:]:
            state.append(token)
    return state


def _step(logits: torch.Tensor, params: SamplingParams, states: list[SamplingState | None]) -> None:
    rows = len(states)
    columns = SamplingColumns(
        temperature=np.full(rows, params.temperature, np.float32),
        top_k=np.full(rows, params.top_k, np.int32),
        top_p=np.full(rows, params.top_p, np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.full(rows, 2 * HISTORY, np.int32),
    )
    columns = with_wishes(columns, [(row, state) for row, state in enumerate(states) if state is not None])
    wanted = columns.logprobs
    raw = None if wanted is None else logits[torch.from_numpy(wanted.row.astype(np.int64))]
    tokens, _ = sample(logits, columns)
    if raw is not None and wanted is not None:
        token_logprobs(raw, tokens[wanted.row], int(wanted.top.max()))
