"""The native executor: a decoder step in bfloat16 by one call of compiled code."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from engine_actor.attention.base import token_positions, token_slots
from engine_actor.executor import Executor, ExecutorInfo
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.models.layers import softcap
from engine_actor.native.build import best_instructions, load_library
from engine_actor.native.memory import zeros
from engine_actor.native.weights import PackedModel, check_shape
from engine_actor.step import Int32, StepRecord
from engine_actor.torch_executor import pool_pages

PARTS = ("linear", "attention", "pointwise", "lm_head")
"""Parts of a step whose time is counted, in the order of src/step.cpp."""


class Step(ctypes.Structure):
    """The structure of the same name in src/kernels.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_rows", "num_logits")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("token_ids", "token_indptr", "start", "page_indices", "page_indptr"),
                *("positions", "slots", "logit_tokens"),
            )
        ),
    ]


class StepArrays:
    """A record as the kernels read it. Keeps the arrays that `struct` points to."""

    def __init__(self, record: StepRecord) -> None:
        logit_tokens = record.logit_tokens
        self._arrays = {
            name: np.ascontiguousarray(values, dtype=np.int32)
            for name, values in {
                "token_ids": record.token_ids,
                "token_indptr": record.token_indptr,
                "start": record.start,
                "page_indices": record.page_indices,
                "page_indptr": record.page_indptr,
                "positions": token_positions(record),
                "slots": token_slots(record),
                "logit_tokens": logit_tokens,
            }.items()
        }
        pointers = {name: values.ctypes.data for name, values in self._arrays.items()}
        self.struct = Step(record.num_tokens, record.num_rows, len(logit_tokens), **pointers)


class Result(ctypes.Structure):
    """The structure of the same name in src/step.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("logits", "highest", "seconds")]


class NativeExecutor(Executor):
    """Runs the model of a checkpoint on the CPU, in bfloat16 with a float32 residual; its weights may be quantised.

    A token's logits are the same to the bit whatever shares the step with it and however its prompt was cut.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_pages: int | None = None,
        kv_memory_bytes: int | None = None,
        threads: int | None = None,
        quantization: str = "none",
    ) -> None:
        """Compile or load the kernels, pack the weights, allocate the KV pool.

        The pool's size is either `num_pages` (the dummy page included) or what fits `kv_memory_bytes`.
        `threads` None is torch's choice; `quantization` is one of weights.QUANTIZATIONS. Raises NativeUnavailable
        when this machine or this model is not served, ValueError for a pool without a usable page.
        """
        check_shape(checkpoint.config, quantization)
        self._library = load_library()
        self.num_pages = pool_pages(checkpoint.config, torch.bfloat16, num_pages, kv_memory_bytes)
        self._threads = threads or torch.get_num_threads()
        self._model = PackedModel(checkpoint, self.num_pages, quantization)
        self._workspace = zeros((1,), torch.uint8)
        self._logits = zeros((1,), torch.float32)
        self._seconds = np.zeros(len(PARTS))
        self.info = ExecutorInfo(
            executor="native",
            attention_backend=f"native-{best_instructions().name}",
            device="cpu",
            dtype="bfloat16",
            quantization=quantization,
            threads=self._threads,
        )

    @property
    def part_seconds(self) -> dict[str, float]:
        return dict(zip(PARTS, self._seconds.tolist(), strict=True))

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the layers' weights and of the output layer's, in the smallest form that a step can read."""
        return self._model.layer_bytes, self._model.output_bytes

    def execute(self, record: StepRecord) -> torch.Tensor:
        arrays = StepArrays(record)
        size = arrays.struct.num_logits * self._model.config.vocab_size
        if size > len(self._logits):
            self._logits = zeros((size,), torch.float32)
        self._run(arrays.struct, logits=self._logits.data_ptr())
        logits = self._logits[:size].view(-1, self._model.config.vocab_size)
        cap = self._model.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)

    def execute_greedy(self, record: StepRecord) -> Int32 | None:
        if self._model.config.logit_softcap is not None:
            return None  # capping can make logits equal
        arrays = StepArrays(record)
        highest = np.empty(arrays.struct.num_logits, np.int32)
        self._run(arrays.struct, highest=highest.ctypes.data)
        return highest

    def _run(self, step: Step, **result: int) -> None:
        model = ctypes.byref(self._model.struct)
        needed = self._library.evenhand_workspace_bytes(model, ctypes.byref(step), self._threads)
        if needed > len(self._workspace):
            self._workspace = zeros((needed,), torch.uint8)
        self._library.evenhand_step(
            model,
            ctypes.byref(step),
            self._workspace.data_ptr(),
            ctypes.byref(Result(seconds=self._seconds.ctypes.data, **result)),
            self._threads,
        )
