"""The attention contract: one page-table form, several backends behind it.

KV lives in pages of PAGE_SIZE tokens; token p of a request is in its page p // PAGE_SIZE, and is written by its flat
slot index page * PAGE_SIZE + p % PAGE_SIZE. Page DUMMY_PAGE takes the writes of padding and is never read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from engine_actor.executor import PAGE_SIZE
from engine_actor.step import Int32, Int64, StepRecord

Metadata = TypeVar("Metadata")


@dataclass(frozen=True)
class PageTable:
    """Pages of R requests after the step: request i owns indices[indptr[i]:indptr[i + 1]], all full but the last,
    which holds last_page_len[i] (1 to PAGE_SIZE) tokens."""

    indptr: Int32  # [R + 1]
    indices: Int32  # [P]
    last_page_len: Int32  # [R]


def page_table(record: StepRecord) -> PageTable:
    """The page table of a step, its new tokens included."""
    kv_length = record.start + record.length
    last_page_len = (kv_length - 1) % PAGE_SIZE + 1
    return PageTable(record.page_indptr, record.page_indices, last_page_len.astype(np.int32))


def token_positions(record: StepRecord) -> Int64:
    """Position of every token of the step inside its request, [T]."""
    first = record.start.astype(np.int64) - record.token_indptr[:-1]
    return np.repeat(first, record.length) + np.arange(record.num_tokens)


def token_slots(record: StepRecord) -> Int64:
    """Flat slot that every token of the step is written to, [T]."""
    position = token_positions(record)
    page = np.repeat(record.page_indptr[:-1].astype(np.int64), record.length) + position // PAGE_SIZE
    return record.page_indices[page].astype(np.int64) * PAGE_SIZE + position % PAGE_SIZE


class AttentionBackend(ABC, Generic[Metadata]):
    """Causal attention of the tokens of a step over the paged KV cache that the backend owns.

    Token t at position p of its request sees positions 0 .. p: with cached or earlier chunks before it, the causal
    mask is aligned at the bottom right. What other requests left in a page must not reach the result, not even NaN.
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

        q is [T, heads, head_dim]; k and v are [T, kv_heads, head_dim]; tokens in record order, q and k rotated.
        Returns [T, heads, head_dim] in the type of q.
        """
