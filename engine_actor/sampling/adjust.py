"""Penalties, biases and forbidden tokens: what changes logits before anything is chosen from them."""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.step import BiasColumns, Int32, PenaltyColumns, SamplingColumns
from engine_actor.transfer import upload


def adjust(logits: torch.Tensor, columns: SamplingColumns) -> Int32:
    """Penalise, then add biases, in place, to float32 logits [S, vocab]. Returns the rows that changed, ascending.

    Only the tokens named in the columns are touched.
    """
    changed = []
    if columns.penalties is not None:
        _penalise(logits, columns.penalties)
        changed.append(columns.penalties.row)
    if columns.bias is not None:
        _add(logits, columns.bias)
        changed.append(columns.bias.row)
    rows: Int32 = np.unique(np.concatenate(changed)) if changed else np.empty(0, np.int32)
    return rows


def _penalise(logits: torch.Tensor, penalties: PenaltyColumns) -> None:
    """Repetition as in Keskar et al., "CTRL", 2019, section 4.1 (negative logits are multiplied); presence and
    frequency as in the OpenAI API reference: subtracted once, and per occurrence in the output."""

    def column(values: np.ndarray) -> torch.Tensor:
        return upload(values, logits.device)

    lengths = np.diff(penalties.token_indptr)
    at = (
        column(np.repeat(penalties.row, lengths).astype(np.int64)),
        column(penalties.token.astype(np.int64)),
    )
    repetition = column(np.repeat(penalties.repetition, lengths))
    subtracted = np.repeat(penalties.frequency, lengths) * penalties.count
    subtracted += np.repeat(penalties.presence, lengths) * (penalties.count > 0)
    values = logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at] = values - column(subtracted.astype(np.float32))


def _add(logits: torch.Tensor, bias: BiasColumns) -> None:
    at = tuple(upload(index.astype(np.int64), logits.device) for index in (bias.row, bias.token))
    # A token may have a bias and be forbidden as well.
    logits.index_put_(at, upload(bias.bias, logits.device), accumulate=True)
