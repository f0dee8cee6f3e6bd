"""The attention contract: one page-table form, several backends behind it.

KV lives in pages of PAGE_SIZE tokens; token p of a request is in its page p // PAGE_SIZE, and is written by
its flat slot index page * PAGE_SIZE + p % PAGE_SIZE. The table of a step is its record's page_indptr [R + 1]
and page_indices [P], int32; all pages of a row are full but the last, which holds (start + length - 1) %
PAGE_SIZE + 1 tokens, the new ones included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
import torch

from engine_actor.executor import PAGE_SIZE
from engine_actor.step import Int64, StepRecord

Metadata = TypeVar("Metadata")


def token_positions(record: StepRecord) -> Int64:
    """Position of every token of the step inside its request, [T]."""
    first = record.start.astype(np.int64) - record.token_indptr[:-1]
    positions: Int64 = np.repeat(first, record.length) + np.arange(record.num_tokens)
    return positions


def token_slots(record: StepRecord) -> Int64:
    """Flat slot that every token of the step is written to, [T]."""
    position = token_positions(record)
    page = np.repeat(record.page_indptr[:-1].astype(np.int64), record.length) + position // PAGE_SIZE
    slots: Int64 = record.page_indices[page].astype(np.int64) * PAGE_SIZE + position % PAGE_SIZE
    return slots


class AttentionBackend(ABC, Generic[Metadata]):
    """Causal attention of the tokens of a step over the paged KV cache that the backend owns.

    Token t at position p of its request sees positions 0 .. p: with cached or earlier chunks before it, the
    causal mask is aligned at the bottom right. What other requests left in a page must not reach the result,
    not even NaN.
    """

    name: str

    @abstractmethod
    def prepare(self, record: StepRecord) -> Metadata:
        """What the layers of one step share: computed once, before the first `forward`."""

    @abstractmethod
    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Metadata
    ) -> torch.Tensor:
        """Write K and V of the step's tokens, then attend.

        q is [T, heads, head_dim]; k and v are [T, kv_heads, head_dim]; tokens in record order, q and k
        rotated. Returns [T, heads, head_dim] in the type of q.
        """
