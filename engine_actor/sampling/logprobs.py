"""Log probabilities of given tokens and of the likeliest ones, by the model's own logits."""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.step import Int32, Logprobs

_ROWS_AT_ONCE = 64
"""Bounds the copies that are made of logits, not the result."""


def token_logprobs(logits: torch.Tensor, tokens: Int32, top: int) -> Logprobs:
    """For float32 logits [N, vocab] and one token each (-1: none, its log probability means nothing).

    Rows of logits that are not finite give log probabilities that are not. `top` is at most the vocabulary's size.
    """
    top = min(top, logits.shape[-1])
    logprob, top_token, top_logprob = [], [], []
    for begin in range(0, len(logits), _ROWS_AT_ONCE):
        part = logits[begin : begin + _ROWS_AT_ONCE]
        chosen = torch.from_numpy(np.maximum(tokens[begin : begin + _ROWS_AT_ONCE], 0).astype(np.int64))
        total = part.logsumexp(dim=-1, keepdim=True)
        logprob.append((part.gather(1, chosen.to(part.device)[:, None]) - total)[:, 0].cpu())
        likeliest = part.topk(top, dim=-1)
        top_token.append(likeliest.indices.cpu())
        top_logprob.append((likeliest.values - total).cpu())
    return Logprobs(
        token=tokens,
        logprob=torch.cat(logprob).numpy(),
        top_token=torch.cat(top_token).numpy().astype(np.int32),
        top_logprob=torch.cat(top_logprob).numpy(),
    )
