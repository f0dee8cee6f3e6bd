"""Attention in plain torch: the oracle for every other backend, and the torch executor's backend on CPU.

Rows of a step are attended in groups of equal row length and similar context, each padded to its longest
context, so that one pair of batched matrix products serves many decode rows. Pools are head-major: gathered
keys are contiguous per head, which is what makes the products fast.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from engine_actor.attention.base import AttentionBackend, token_slots
from engine_actor.executor import PAGE_SIZE
from engine_actor.step import Int64, StepRecord

# Padded slots that a group of decode rows may hold: the price of one more pair of matrix products, about.
_MAX_PADDING = 1024

# Contexts are padded to a multiple, so that shapes recur and the matrix library can reuse its kernels.
_CONTEXT_MULTIPLE = 32


@dataclass(frozen=True)
class RowGroup:
    """B rows of n tokens each, over L slots: `tokens` [B * n] in the step, `slots` [B * L] in the pool,
    `bias` [B, 1, n, L] float32 that is 0 for what a token sees and -inf for the rest, and the same for layers
    with a sliding window."""

    tokens: torch.Tensor
    slots: torch.Tensor
    bias: torch.Tensor
    sliding_bias: torch.Tensor


@dataclass(frozen=True)
class ReferenceMetadata:
    """`slots` [T] is where the new K and V go."""

    slots: torch.Tensor
    groups: list[RowGroup]


class ReferenceBackend(AttentionBackend[ReferenceMetadata]):
    """Pools are [layers, kv_heads, slots, head_dim]."""

    name = "reference"

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float | None = None,
        sliding_window: int | None = None,
        sliding_layers: Collection[int] = (),
    ) -> None:
        """`scale` None is head_dim**-0.5; a token of the `sliding_layers` sees `sliding_window` tokens."""
        shape = (num_layers, num_kv_heads, num_pages * PAGE_SIZE, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._scale = head_dim**-0.5 if scale is None else scale
        self._window = sliding_window
        self._sliding_layers = frozenset(sliding_layers)

    def prepare(self, record: StepRecord) -> ReferenceMetadata:
        device = self._keys.device
        groups = [_row_group(record, rows, device, self._window) for rows in _similar_rows(record)]
        return ReferenceMetadata(torch.from_numpy(token_slots(record)).to(device), groups)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: ReferenceMetadata
    ) -> torch.Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(1, metadata.slots, k.transpose(0, 1))
        values.index_copy_(1, metadata.slots, v.transpose(0, 1))
        if len(metadata.groups) == 1:
            return self._attend(layer, q, keys, values, metadata.groups[0])
        out = torch.empty_like(q)
        for group in metadata.groups:
            out[group.tokens] = self._attend(layer, q[group.tokens], keys, values, group)
        return out

    def _attend(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: RowGroup
    ) -> torch.Tensor:
        """q [B * n, heads, head_dim] of one group to its output in the same shape."""
        bias = group.sliding_bias if layer in self._sliding_layers else group.bias
        (rows, _, n, context), (kv_heads, _, head_dim) = bias.shape, keys.shape
        k = keys.index_select(1, group.slots).view(kv_heads, rows, context, head_dim)
        v = values.index_select(1, group.slots).view(kv_heads, rows, context, head_dim)
        # The query heads that share a KV head become rows of one product.
        by_head = q.view(rows, n, kv_heads, -1, head_dim).permute(2, 0, 3, 1, 4)
        shared = by_head.shape[2]
        scores = by_head.reshape(kv_heads, rows, shared * n, head_dim) @ k.transpose(-1, -2)
        scores = scores.view(kv_heads, rows, shared, n, context)
        probabilities = torch.softmax(torch.add(bias, scores, alpha=self._scale), dim=-1).to(q.dtype)
        out = probabilities.view(kv_heads, rows, shared * n, context) @ v
        out = out.view(kv_heads, rows, shared, n, head_dim).permute(1, 3, 0, 2, 4)
        return out.reshape(rows * n, kv_heads * shared, head_dim)


def _similar_rows(record: StepRecord) -> list[Int64]:
    """Rows to attend together: decode rows by falling context while padding stays small, other rows alone."""
    context = (record.start + record.length).tolist()
    decode = np.flatnonzero(record.length == 1)
    groups: list[list[int]] = []
    padding = 0
    for row in sorted(decode.tolist(), key=lambda row: -context[row]):
        if groups:
            padding += context[groups[-1][0]] - context[row]
        if not groups or padding > _MAX_PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(row)
    alone = [np.array([row]) for row in np.flatnonzero(record.length != 1)]
    return [np.sort(np.array(rows)) for rows in groups] + alone


def _row_group(record: StepRecord, rows: Int64, device: torch.device, window: int | None) -> RowGroup:
    n = int(record.length[rows[0]])
    first_token = record.token_indptr[rows].astype(np.int64)
    start = record.start[rows].astype(np.int64)
    last = start + n - 1
    context = -(-int(last.max() + 1) // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE
    position = np.arange(context)
    # A masked slot is read too, and 0 * NaN is NaN: let it be the row's own newest slot, never a stranger's.
    readable = np.minimum(position, last[:, None])
    page = record.page_indices[record.page_indptr[rows].astype(np.int64)[:, None] + readable // PAGE_SIZE]
    slots = page.astype(np.int64) * PAGE_SIZE + readable % PAGE_SIZE
    token = (start[:, None] + np.arange(n))[:, :, None]
    hidden = position > token

    def bias(hidden: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0.0))[:, None]).to(device)

    full = bias(hidden)
    return RowGroup(
        tokens=torch.from_numpy((first_token[:, None] + np.arange(n)).ravel()).to(device),
        slots=torch.from_numpy(slots.ravel()).to(device),
        bias=full,
        sliding_bias=full if window is None else bias(hidden | (position <= token - window)),
    )
