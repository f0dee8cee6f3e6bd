"""Drawing tokens on a GPU, all rows at once and without waiting for it."""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.step import Float32, Int32
from engine_actor.transfer import upload

_BITS_OF_ONE = 0x3F800000
"""1.0 as the bits of a float32. Those of floats from 0 on are in the order of their values."""


def draw_rows(
    logits: torch.Tensor,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    min_p: Float32 | None,
    random: np.ndarray,
) -> torch.Tensor:
    """A token for each row of logits [rows, vocab], int64 [rows], as `host.draw` chooses one.

    For rows that are not finite it is any number.
    """
    # Shifted before the division, so that no temperature can overflow.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= upload(temperature, logits.device)[:, None]
    if min_p is not None:
        _drop_unlikely(scaled, min_p)
    _keep_likeliest(scaled, top_k)
    weights = scaled.exp_()
    _keep_nucleus(weights, top_p)
    return _draw(weights, random)


def _draw(weights: torch.Tensor, random: np.ndarray) -> torch.Tensor:
    """The token at which the cumulative weight passes one random number a row times the sum."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    # right=True steps over weights of 0: their cumulative value equals the one before. Rounding must not step over the
    # last weight that is none.
    chosen = torch.searchsorted(cumulative, upload(random, weights.device)[:, None] * total, right=True)
    return torch.minimum(chosen, torch.searchsorted(cumulative, total))[:, 0]


def _drop_unlikely(scaled: torch.Tensor, min_p: Float32) -> None:
    """Set tokens whose probability is below min_p times the greatest one to -inf, in place (Nguyen et al., "Turning
    up the heat: min-p sampling", 2024)."""
    limited = np.flatnonzero(min_p > 0)
    if len(limited):
        index = upload(limited, scaled.device)
        least = upload(np.log(min_p[limited]), scaled.device)[:, None]
        values = scaled[index]
        scaled[index] = values.masked_fill_(values < least, -torch.inf)


def _keep_likeliest(scaled: torch.Tensor, top_k: Int32) -> None:
    """Set all but the top_k greatest values of a row, and ties with the last, to -inf, in place."""
    limited = np.flatnonzero((top_k > 0) & (top_k < scaled.shape[-1]))
    if len(limited):
        index = upload(limited, scaled.device)
        last = upload(top_k[limited].astype(np.int64), scaled.device)[:, None] - 1
        values = scaled[index]
        least = values.topk(int(top_k[limited].max())).values.gather(1, last)
        scaled[index] = values.masked_fill_(values < least, -torch.inf)


def _keep_nucleus(weights: torch.Tensor, top_p: Float32) -> None:
    """Set weights, 0 .. 1, outside the smallest set of greatest ones that reaches top_p of the sum to 0, in place.

    The least weight in the nucleus is found by bisection over its bits: no sort, and no number that the host waits for.
    """
    nucleus = np.flatnonzero(top_p < 1)
    if len(nucleus) == 0:
        return
    index = upload(nucleus, weights.device)
    values = weights[index]
    bits = values.view(torch.int32)

    def sum_of(kept: torch.Tensor) -> torch.Tensor:
        return torch.where(kept, values, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)

    least = torch.zeros_like(bits[:, :1])
    needed = upload(top_p[nucleus].astype(np.float64), weights.device)[:, None] * sum_of(bits >= least)
    beyond = torch.full_like(least, _BITS_OF_ONE + 1)  # the least weight is in [least, beyond)
    for _ in range(_BITS_OF_ONE.bit_length()):
        middle = (least + beyond) // 2
        reached = sum_of(bits >= middle) >= needed
        least, beyond = torch.where(reached, middle, least), torch.where(reached, beyond, middle)
    weights[index] = values.masked_fill_(bits < least, 0.0)
