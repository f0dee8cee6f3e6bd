"""Log probabilities of given tokens and of the likeliest ones, by the model's own logits."""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.sampling.host import lower_bound
from engine_actor.step import Float32, Int32, Logprobs


def token_logprobs(logits: torch.Tensor, tokens: Int32, top: int) -> Logprobs:
    """For float32 logits [N, vocab] and one token each (-1: none, its log probability means nothing).

    Rows of logits that are not finite give log probabilities that are not. `top` tokens, the vocabulary at most; of
    equally likely ones those of the lowest ids.
    """
    top = min(top, logits.shape[-1])
    if logits.device.type != "cpu":
        return _on_device(logits, tokens, top)
    values = logits.numpy()
    total = np.empty(len(values), np.float32)
    top_token = np.empty((len(values), top), np.int32)
    for row, own in enumerate(values):
        total[row] = _log_sum_exp(own)
        if top:
            candidates = np.flatnonzero(own >= lower_bound(own, top))
            chosen = candidates[np.argsort(-own[candidates], kind="stable")[:top]]
            top_token[row, : len(chosen)] = chosen  # of NaN there are none
    rows = np.arange(len(values))
    return Logprobs(
        token=tokens,
        logprob=values[rows, np.maximum(tokens, 0)] - total,
        top_token=top_token,
        top_logprob=values[rows[:, None], top_token] - total[:, None],
    )


def _log_sum_exp(values: Float32) -> float:
    highest = values.max()
    shifted = values - highest
    return float(highest + np.log(np.exp(shifted, out=shifted).sum()))


def _on_device(logits: torch.Tensor, tokens: Int32, top: int) -> Logprobs:
    chosen = torch.from_numpy(np.maximum(tokens, 0).astype(np.int64)).to(logits.device)
    total = logits.logsumexp(dim=-1, keepdim=True)
    likeliest = logits.topk(top, dim=-1)
    return Logprobs(
        token=tokens,
        logprob=(logits.gather(1, chosen[:, None]) - total)[:, 0].cpu().numpy(),
        top_token=likeliest.indices.cpu().numpy().astype(np.int32),
        top_logprob=(likeliest.values - total).cpu().numpy(),
    )
