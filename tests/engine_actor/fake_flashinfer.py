"""A `flashinfer` for machines without a GPU: it holds callers to the real package's contract and answers with torch.

Signatures are those of the wheels 0.6.4 and 0.7.4. What it checks: names of arguments, types, shapes, int32, where a
tensor lies, monotone tables, a `plan` before each `run` and none while a graph is captured, and that the copy of one
plan has ended before the next plan on the same wrapper.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

_INIT_DECODE = {
    "float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores", "paged_kv_indptr_buffer",
    "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer", "backend", "jit_args",
}  # fmt: skip
_INIT_PREFILL = {
    "float_workspace_buffer", "kv_layout", "use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf",
    "paged_kv_indices_buf", "paged_kv_last_page_len_buf", "custom_mask_buf", "mask_indptr_buf", "backend", "jit_args",
    "jit_kwargs",
}  # fmt: skip
_PLAN = {
    "num_qo_heads", "num_kv_heads", "page_size", "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type",
    "kv_data_type", "o_data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens",
    "fixed_split_size", "disable_split_kv",
}  # fmt: skip
_PLAN_DECODE = _PLAN | {"indptr", "indices", "last_page_len", "head_dim"}
_PLAN_PREFILL = _PLAN | {
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "head_dim_qk", "head_dim_vo",
    "custom_mask", "packed_custom_mask", "causal", "use_fp16_qk_reduction", "seq_lens_q",
}  # fmt: skip


class FakeEvent:
    """torch.cuda.Event of a stream on which a plan's copy ends when somebody waits for it."""

    def __init__(self, fake: FakeFlashInfer) -> None:
        self._fake = fake
        self._before: list[_Wrapper] | None = None

    def record(self) -> None:
        self._before = list(self._fake.copying)

    def synchronize(self) -> None:
        assert self._before is not None, "synchronized before it was recorded"
        for wrapper in self._before:
            wrapper.copying = False


class FakeFlashInfer(ModuleType):
    """The module. `capturing` is set by a fake graph while it records."""

    def __init__(self, version: str = "0.6.4") -> None:
        super().__init__("flashinfer")
        self.__version__ = version
        self.capturing = False
        self.copying: list[_Wrapper] = []
        self.plans: list[str] = []
        fake = self

        class BatchDecodeWithPagedKVCacheWrapper(_Decode):
            module = fake

        class BatchPrefillWithPagedKVCacheWrapper(_Prefill):
            module = fake

        self.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper

    def make_event(self) -> FakeEvent:
        return FakeEvent(self)


class _Wrapper:
    module: FakeFlashInfer
    allowed_init: set[str]
    allowed_plan: set[str]

    def __init__(self, workspace: torch.Tensor, **options: Any) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 16 << 20
        assert set(options) <= self.allowed_init, set(options) - self.allowed_init
        assert options.get("kv_layout", "NHD") == "NHD"
        assert options["backend"] == "fa2", "the kernels must be pinned"
        self.options = options
        self.copying = False
        self.planned: dict[str, Any] | None = None
        self.tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def plan(self, **arguments: Any) -> None:
        assert set(arguments) <= self.allowed_plan, set(arguments) - self.allowed_plan
        assert not self.module.capturing, "plan while a graph is captured"
        assert not self.copying, "plan before the copy of the plan before has ended"
        assert {"q_data_type", "kv_data_type"} <= set(arguments), "the default is float16"
        assert arguments["q_data_type"] in (torch.float16, torch.bfloat16)
        assert arguments["num_qo_heads"] % arguments["num_kv_heads"] == 0
        self.tables = self._check_tables(arguments)
        self.planned = arguments
        self.copying = True
        self.module.copying.append(self)
        self.module.plans.append(type(self).__name__)

    def _check_tables(self, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _check(
        self, qo: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
    ) -> Any:
        for table in (qo, indptr, indices, last):
            assert table.dtype == torch.int32 and table.dim() == 1
        assert qo.device.type == indptr.device.type == "cpu", "a device tensor costs a copy that waits"
        assert len(qo) == len(indptr) == len(last) + 1
        assert qo[0] == indptr[0] == 0 and (qo.diff() > 0).all() and (indptr.diff() > 0).all()
        assert indptr[-1] == len(indices)
        assert ((last >= 1) & (last <= self.planned_page_size)).all()
        return qo.clone(), indptr.clone(), indices.clone(), last.clone()

    planned_page_size = 16

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert self.planned is not None and self.tables is not None, "run before plan"
        qo, indptr, indices, last = self.tables
        keys, values = paged_kv_cache
        heads, kv_heads = self.planned["num_qo_heads"], self.planned["num_kv_heads"]
        dim = self.planned.get("head_dim", self.planned.get("head_dim_qk"))
        assert q.shape == (int(qo[-1]), heads, dim) and q.is_contiguous()
        assert (
            q.dtype == self.planned["q_data_type"]
            and keys.dtype == values.dtype == self.planned["kv_data_type"]
        )
        assert keys.shape == values.shape == (len(keys), self.planned["page_size"], kv_heads, dim)
        window = self.planned.get("window_left", -1)
        cap = self.planned.get("logits_soft_cap") or 0.0
        scale = self.planned.get("sm_scale") or dim**-0.5
        out = torch.empty_like(q)
        for row in range(len(last)):
            pages = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(pages) - 1) * self.planned["page_size"] + int(last[row])
            first, end = int(qo[row]), int(qo[row + 1])
            assert end - first <= length, "the table must hold the new tokens as well"
            k = keys[pages].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1)
            v = values[pages].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), k) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            position = torch.arange(length - (end - first), length)[:, None]
            seen = torch.arange(length)[None] <= position
            if window >= 0:
                seen &= torch.arange(length)[None] >= position - window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out


class _Decode(_Wrapper):
    allowed_init = _INIT_DECODE
    allowed_plan = _PLAN_DECODE

    def _check_tables(self, arguments: dict[str, Any]) -> Any:
        indptr, indices, last = arguments["indptr"], arguments["indices"], arguments["last_page_len"]
        group = arguments["num_qo_heads"] // arguments["num_kv_heads"]
        assert self.options.get("use_tensor_cores") or group in (1, 2, 3, 4, 6, 8)
        if self.options.get("use_cuda_graph"):
            buffers = [
                self.options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
            ]
            assert all(buffer.dtype == torch.int32 for buffer in buffers)
            assert len(last) == len(buffers[2]) == len(buffers[0]) - 1, "a graph's batch size is fixed"
            assert len(indices) <= len(buffers[1])
        return self._check(torch.arange(len(last) + 1, dtype=torch.int32), indptr, indices, last)


class _Prefill(_Wrapper):
    allowed_init = _INIT_PREFILL
    allowed_plan = _PLAN_PREFILL

    def _check_tables(self, arguments: dict[str, Any]) -> Any:
        assert arguments.get("causal") is True, "the default is not causal"
        return self._check(
            arguments["qo_indptr"],
            arguments["paged_kv_indptr"],
            arguments["paged_kv_indices"],
            arguments["paged_kv_last_page_len"],
        )
