"""Drawing tokens on a GPU, all rows at once."""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.step import Float32, Int32

# How many of the likeliest tokens are searched for the end of the nucleus before the whole vocabulary is.
_NUCLEUS_CANDIDATES = (1024, 16384)


def draw_rows(
    logits: torch.Tensor,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    min_p: Float32 | None,
    random: np.ndarray,
) -> Int32:
    """A token for each row of finite logits [rows, vocab], as `host.draw` chooses one."""
    # Shifted before the division, so that no temperature can overflow.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= torch.from_numpy(temperature).to(logits.device)[:, None]
    if min_p is not None:
        _drop_unlikely(scaled, min_p)
    _filter(scaled, top_k, top_p)
    return _draw(scaled, random)


def _draw(scaled: torch.Tensor, random: np.ndarray) -> Int32:
    """Invert the cumulative distribution of softmax(scaled), maxima 0, at one random number a row."""
    cumulative = scaled.exp().cumsum(dim=-1, dtype=torch.float64)
    target = torch.from_numpy(random).to(scaled.device)[:, None] * cumulative[:, -1:]
    # right=True steps over tokens of probability 0: their cumulative value equals the one before.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].cpu().numpy().astype(np.int32)


def _drop_unlikely(scaled: torch.Tensor, min_p: Float32) -> None:
    """Set tokens whose probability is below min_p times the greatest one to -inf, in place (Nguyen et al., "Turning
    up the heat: min-p sampling", 2024)."""
    limited = np.flatnonzero(min_p > 0)
    if len(limited):
        index = torch.from_numpy(limited).to(scaled.device)
        least = torch.from_numpy(np.log(min_p[limited])).to(scaled.device)[:, None]
        values = scaled[index]
        scaled[index] = values.masked_fill_(values < least, -torch.inf)


def _filter(scaled: torch.Tensor, top_k: Int32, top_p: Float32) -> None:
    """Set what top_k and top_p exclude to -inf, in place."""
    vocab = scaled.shape[-1]
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab))
    if len(limited):
        index = torch.from_numpy(limited)
        last = torch.from_numpy(top_k[limited].astype(np.int64))[:, None].to(scaled.device) - 1
        values = scaled[index]
        least = values.topk(int(top_k[limited].max())).values.gather(1, last)
        scaled[index] = values.masked_fill_(values < least, -torch.inf)
    nucleus = np.flatnonzero(top_p < 1)
    if len(nucleus):
        index = torch.from_numpy(nucleus)
        values = scaled[index]
        least = _least_in_nucleus(values, torch.from_numpy(top_p[nucleus]).to(scaled.device))
        scaled[index] = values.masked_fill_(values < least, -torch.inf)


def _least_in_nucleus(values: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the least value in the smallest set of likeliest tokens whose probability reaches top_p."""
    needed = top_p.double()[:, None] * values.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    least = torch.empty_like(needed, dtype=values.dtype)
    rows = torch.arange(len(values), device=values.device)
    vocab = values.shape[-1]
    for count in (*(count for count in _NUCLEUS_CANDIDATES if count < vocab), vocab):
        candidates = values[rows].topk(count).values
        mass = candidates.exp().cumsum(dim=-1, dtype=torch.float64)
        last = (mass < needed[rows]).sum(dim=-1, keepdim=True)
        least[rows] = candidates.gather(1, last.clamp(max=count - 1))
        rows = rows[last[:, 0] == count]
        if len(rows) == 0:
            break
    return least
