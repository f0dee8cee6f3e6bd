"""Attention by FlashInfer's paged kernels (Ye et al., "FlashInfer", MLSys'25) on CUDA.

Written for FlashInfer 0.6.4 to 0.7.x: arguments go by keyword, because their order differs between versions, and both
data types are always named, because their default is float16. The kernels are pinned to "fa2", so that the same
numbers come from every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from engine_actor.attention.base import AttentionBackend, token_slots
from engine_actor.executor import DUMMY_PAGE, PAGE_SIZE
from engine_actor.step import Int32, StepRecord
from engine_actor.transfer import upload

WORKSPACE_BYTES = 128 << 20
"""Scratch memory of the kernels, as FlashInfer advises. Shared by all wrappers: they run one after another."""

_CUDA_CORE_GROUPS = (1, 2, 3)
"""Query heads per KV head for which decode runs without tensor cores; with four or more those are faster."""

_LAYOUT = "NHD"
_ALL = -1  # as `window_left`: how many tokens before its own a token sees, without bound


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class PageTable:
    """A step's page table on the host, int32, in the form that the kernels plan on.

    `indptr` [R + 1], `indices` [P], `last_page_len` [R] in 1 .. PAGE_SIZE.
    """

    indptr: Int32
    indices: Int32
    last_page_len: Int32

    @classmethod
    def of(cls, record: StepRecord) -> PageTable:
        end = record.start + record.length
        return cls(record.page_indptr, record.page_indices, ((end - 1) % PAGE_SIZE + 1).astype(np.int32))

    def padded(self, rows: int) -> PageTable:
        """The table with rows added that read one token of the dummy page, up to `rows` in all."""
        missing = rows - len(self.last_page_len)
        return PageTable(
            np.concatenate((self.indptr, self.indptr[-1] + np.arange(1, missing + 1, dtype=np.int32))),
            np.concatenate((self.indices, np.full(missing, DUMMY_PAGE, np.int32))),
            np.concatenate((self.last_page_len, np.ones(missing, np.int32))),
        )


@dataclass(frozen=True)
class FlashInferMetadata:
    """`wrappers` are planned for the step, one per window; `slots` [T] int64 is where its new K and V go."""

    wrappers: dict[int, Any]
    slots: torch.Tensor


class PlannedWrappers:
    """Wrappers of one kernel, by window, and the rule of their `plan`: it copies from pinned memory without waiting,
    and the next plan would overwrite that memory, so that plan waits for the copies of the one before."""

    def __init__(self, wrappers: dict[int, Any], make_event: Callable[[], Event]) -> None:
        self.wrappers = wrappers
        self._make_event = make_event
        self._copied: Event | None = None

    def plan(self, **arguments: Any) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        for window_left, wrapper in self.wrappers.items():
            wrapper.plan(window_left=window_left, **arguments)
        self._copied = self._copied or self._make_event()
        self._copied.record()


class FlashInferBackend(AttentionBackend[FlashInferMetadata]):
    """Pools are [layers, pages, PAGE_SIZE, kv_heads, head_dim], one for keys and one for values.

    Steps of decode rows alone run the decode kernel, all others the prefill kernel with a causal mask aligned at the
    bottom right. A slot beyond a row's last token is never read into the result: the kernels fill it with zeros.
    A window is part of a plan, so that each window of the model has a wrapper of its own.
    """

    name = "flashinfer"

    def __init__(
        self,
        flashinfer: ModuleType,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float | None = None,
        sliding_window: int | None = None,
        sliding_layers: Collection[int] = (),
        make_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        """`flashinfer` is the imported package, `scale` None is head_dim**-0.5. A token of the `sliding_layers` sees
        `sliding_window` tokens, itself included.

        Raises ValueError for a type its kernels do not compute in.
        """
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"FlashInfer computes in float16 and bfloat16, not in {dtype}")
        shape = (num_layers, num_pages, PAGE_SIZE, num_kv_heads, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._flashinfer = flashinfer
        self._common: dict[str, Any] = {
            "num_qo_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "page_size": PAGE_SIZE,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "sm_scale": head_dim**-0.5 if scale is None else scale,
        }
        self._head_dim = head_dim
        self._make_event = make_event
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._tensor_cores = num_heads // num_kv_heads not in _CUDA_CORE_GROUPS
        self._window_left = [_ALL] * num_layers
        if sliding_window is not None:
            for layer in sliding_layers:
                self._window_left[layer] = sliding_window - 1
        windows = sorted(set(self._window_left))
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._prefill = PlannedWrappers(
            {w: prefill(self._workspace, kv_layout=_LAYOUT, backend="fa2") for w in windows}, make_event
        )
        self._decode = self._decode_wrappers()

    @property
    def device(self) -> torch.device:
        return self._keys.device

    def prepare(self, record: StepRecord) -> FlashInferMetadata:
        table = PageTable.of(record)
        if int(record.length.max()) == 1:
            self.plan_decode(self._decode, table)
            planned = self._decode
        else:
            planned = self._prefill
            planned.plan(
                qo_indptr=torch.from_numpy(record.token_indptr),
                paged_kv_indptr=torch.from_numpy(table.indptr),
                paged_kv_indices=upload(table.indices, self.device),
                paged_kv_last_page_len=torch.from_numpy(table.last_page_len),
                head_dim_qk=self._head_dim,
                causal=True,
                **self._common,
            )
        return FlashInferMetadata(planned.wrappers, upload(token_slots(record), self.device))

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: FlashInferMetadata
    ) -> torch.Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.flatten(0, 1).index_copy_(0, metadata.slots, k)
        values.flatten(0, 1).index_copy_(0, metadata.slots, v)
        out: torch.Tensor = metadata.wrappers[self._window_left[layer]].run(q.contiguous(), (keys, values))
        return out

    def graph_wrappers(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> PlannedWrappers:
        """Decode wrappers for a captured graph of len(last_page_len) rows, over fixed device buffers (int32)."""
        return self._decode_wrappers(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )

    def plan_decode(self, planned: PlannedWrappers, table: PageTable) -> None:
        """Plan one decode step: before its first layer, and never while a graph is captured."""
        planned.plan(
            indptr=torch.from_numpy(table.indptr),
            indices=upload(table.indices, self.device),
            last_page_len=torch.from_numpy(table.last_page_len),
            head_dim=self._head_dim,
            **self._common,
        )

    def _decode_wrappers(self, **buffers: Any) -> PlannedWrappers:
        wrappers = {
            window_left: self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                kv_layout=_LAYOUT,
                use_tensor_cores=self._tensor_cores,
                backend="fa2",
                **buffers,
            )
            for window_left in sorted(set(self._window_left))
        }
        return PlannedWrappers(wrappers, self._make_event)
