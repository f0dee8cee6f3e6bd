"""The torch executor: a decoder module over an attention backend."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import torch

from engine_actor.attention.base import token_positions
from engine_actor.attention.flashinfer import FlashInferBackend
from engine_actor.attention.select import AttentionChoice, AttentionShape, select_attention
from engine_actor.executor import PAGE_SIZE, Executor, ExecutorInfo
from engine_actor.graphs import DecodeGraphs
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.config import ModelConfig
from engine_actor.models.decoder import Decoder
from engine_actor.models.layers import packed_bfloat16_available
from engine_actor.step import StepRecord
from engine_actor.transfer import fill_in, upload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchExecutor(Executor):
    """Runs the model of a checkpoint with plain torch, over a KV pool of its own."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "bfloat16",
        num_pages: int | None = None,
        kv_memory_bytes: int | None = None,
        threads: int | None = None,
        device: str = "cpu",
        attention: AttentionChoice = "auto",
        graph_rows: int = 0,
    ) -> None:
        """Read the weights and allocate the KV pool.

        The pool's size is either `num_pages` (the dummy page included) or what fits `kv_memory_bytes`.
        `threads` is the number of CPU threads, None for torch's choice. With FlashInfer, decode steps of up to
        `graph_rows` rows become CUDA graphs. Raises ValueError for a dtype that is unknown or unsafe for the model
        or a pool without a usable page, AttentionUnavailable for an attention backend that was insisted on and can
        not be used.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
        config = checkpoint.config
        if dtype == "float16" and config.post_norms:
            # The size of their activations is known to leave the range of float16.
            raise ValueError(f"dtype float16 overflows in {config.architecture}: take bfloat16 or float32")
        self.num_pages = pool_pages(config, DTYPES[dtype], num_pages, kv_memory_bytes)
        self._device = torch.device(device)
        self._threads = threads or torch.get_num_threads()
        self._thread: int | None = None
        self._adopt_thread()
        fallback_reason = None
        if dtype == "float16" and self._device.type == "cpu":
            warnings.warn("float16 is slow on a CPU: bfloat16 or float32 serve better", stacklevel=2)
        if dtype == "float16" and config.weights_dtype == "bfloat16":
            warnings.warn("the weights were made in bfloat16 and may overflow in float16", stacklevel=2)
        if self._device.type == "cpu" and dtype == "bfloat16" and not packed_bfloat16_available():
            fallback_reason = "oneDNN has no packed bfloat16 linear layers on this machine"
        self._model = Decoder(checkpoint, DTYPES[dtype], self._device)
        shape = AttentionShape(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.attention_scale,
            sliding_window=config.sliding_window,
            sliding_layers=config.sliding_layers,
        )
        self._attention, attention_reason = select_attention(
            attention, shape, num_pages=self.num_pages, dtype=DTYPES[dtype], device=self._device
        )
        self._graphs = None
        if graph_rows and isinstance(self._attention, FlashInferBackend):
            with torch.inference_mode():
                self._graphs = DecodeGraphs(
                    self._forward,
                    self._attention,
                    max_rows=graph_rows,
                    max_model_len=config.max_position_embeddings,
                    vocab_size=config.vocab_size,
                )
            self.graphs = self._graphs.counters
        self.info = ExecutorInfo(
            executor="torch",
            attention_backend=self._attention.name,
            device=str(self._device),
            dtype=dtype,
            quantization="none",
            threads=self._threads,
            fallback_reason=attention_reason or fallback_reason,
        )

    @torch.inference_mode()
    def execute(self, record: StepRecord, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """`sampled` [S] are the tokens of the step before, on the device, for a record that does not know them."""
        self._adopt_thread()
        if self._graphs is not None and (logits := self._graphs.execute(record, sampled)) is not None:
            return logits
        token_ids = self._tensor(record.token_ids)
        fill_in(token_ids, record, sampled)
        return self._forward(
            token_ids,
            self._tensor(token_positions(record)),
            self._tensor(record.logit_tokens),
            self._attention.prepare(record),
        )

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_tokens: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        return self._model.forward(
            token_ids=token_ids,
            positions=positions,
            logit_tokens=logit_tokens,
            attention=self._attention,
            metadata=metadata,
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return upload(values.astype(np.int64), self._device)

    def _adopt_thread(self) -> None:
        # The OpenMP thread count belongs to the calling thread, and the engine may build and run in different
        # ones.
        if self._thread != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._thread = threading.get_ident()


def pool_pages(
    config: ModelConfig, dtype: torch.dtype, num_pages: int | None, kv_memory_bytes: int | None
) -> int:
    """Pages of a KV pool given by number or by memory. Raises ValueError when no page is usable."""
    if (num_pages is None) == (kv_memory_bytes is None):
        raise ValueError("give either num_pages or kv_memory_bytes")
    if kv_memory_bytes is not None:
        values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        num_pages = kv_memory_bytes // (values * PAGE_SIZE * dtype.itemsize)
    if num_pages is None or num_pages < 2:
        raise ValueError("the KV pool has no usable page: it needs the dummy page and at least one more")
    return num_pages
