"""Choosing the next token of every row: greedy, or from the filtered distribution.

A row's token depends on its own logits, parameters, seed and position alone, whatever else is in the batch. What few
rows ask for costs those rows: a greedy row is one argmax.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.sampling.adjust import adjust
from engine_actor.sampling.device import draw_rows
from engine_actor.sampling.host import draw
from engine_actor.sampling.random import uniform
from engine_actor.step import Bool, Int32, SamplingColumns
from engine_actor.transfer import upload


def sample(logits: torch.Tensor, columns: SamplingColumns) -> tuple[Int32, Bool]:
    """Token ids [S] for float32 logits [S, vocab], and whether each row's logits were all finite.

    A row that is not finite gets token 0. Penalties and biases come first and change the logits in place; then
    temperature, then min_p, top_k, and top_p on what is left; tokens that tie with the last one kept are kept.
    """
    tokens, finite = sample_on_device(logits, columns)
    return tokens.cpu().numpy(), finite.cpu().numpy()


def sample_on_device(logits: torch.Tensor, columns: SamplingColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `sample`, but the answer, int32 and bool [S], stays on the device of the logits: a GPU is not waited for."""
    if logits.device.type == "cpu":
        tokens, finite = _on_cpu(logits, columns)
        return torch.from_numpy(tokens), torch.from_numpy(finite)
    return _on_gpu(logits, columns)


def _on_cpu(logits: torch.Tensor, columns: SamplingColumns) -> tuple[Int32, Bool]:
    if logits.shape[0] == 0:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
    values = logits.numpy()
    finite = np.isfinite(values.min(axis=1)) & np.isfinite(values.max(axis=1))
    adjust(logits, columns)
    tokens = values.argmax(axis=1).astype(np.int32)
    tokens[~finite] = 0
    rows = np.flatnonzero(finite & (columns.temperature > 0))
    if len(rows):
        random = uniform(columns.seed[rows], columns.position[rows]).tolist()
        for row, number in zip(rows.tolist(), random, strict=True):
            tokens[row] = draw(
                values[row],
                float(values[row, tokens[row]]),
                float(columns.temperature[row]),
                int(columns.top_k[row]),
                float(columns.top_p[row]),
                0.0 if columns.min_p is None else float(columns.min_p[row]),
                number,
            )
    return tokens, finite


def _on_gpu(logits: torch.Tensor, columns: SamplingColumns) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.shape[0] == 0:
        return logits.new_empty(0, dtype=torch.int32), logits.new_empty(0, dtype=torch.bool)
    lowest, highest = logits.aminmax(dim=-1)
    finite = torch.isfinite(lowest) & torch.isfinite(highest)
    adjust(logits, columns)
    tokens = logits.argmax(dim=-1)
    rows = np.flatnonzero(columns.temperature > 0)
    if len(rows):
        index = upload(rows, logits.device)
        tokens[index] = draw_rows(
            logits[index],
            columns.temperature[rows],
            columns.top_k[rows],
            columns.top_p[rows],
            None if columns.min_p is None else columns.min_p[rows],
            uniform(columns.seed[rows], columns.position[rows]),
        )
    return tokens.where(finite, 0).to(torch.int32), finite
