"""From options to an engine: which runner, how many pages, which limits. Used by the actor and by benchmarks."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_actor.executor import PAGE_SIZE, Executor, Runner
from engine_actor.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from engine_actor.attention.select import AttentionChoice
    from engine_actor.loading.checkpoint import Checkpoint
    from engine_actor.loading.config import ModelConfig

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_BYTES = 1 << 30
DEFAULT_CUDA_KV_SHARE = 0.8
STUB_PAGES = 4096
STUB_MODEL_LEN = 8192
STUB_VOCABULARY = 259  # 256 bytes and three control tokens


@dataclass(frozen=True)
class EngineOptions:
    """What a user may choose about one engine. None means the default of the device.

    `engine` is "auto", "native", "torch" or "stub": "auto" takes the native executor on a CPU in bfloat16 where it
    can run, else torch, and "native" insists on it. `attention` is that of the torch executor: "auto" takes FlashInfer
    on CUDA where it can run, else the reference, and "flashinfer" insists on it. `kv_pages` counts usable pages,
    `kv_bytes` is the alternative. `quantization` other than "none" is of the native executor alone.
    `async_scheduling` is of the torch executor alone. `max_model_len` None is the model's own context length.
    `threads` None takes every core given to the process.
    """

    source: str
    revision: str | None = None
    engine: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    attention: AttentionChoice = "auto"
    threads: int | None = None
    kv_pages: int | None = None
    kv_bytes: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 128
    max_model_len: int | None = None
    prefill_chunk_size: int = 128
    kv_cache_utilization_limit: float = 0.95
    kv_watermark: float = 0.01
    prefix_caching: bool = True
    request_level_batching: bool = False
    prefill_first: bool = False
    async_scheduling: bool = False


@dataclass(frozen=True)
class BuiltEngine:
    """A runner with the limits that fit it. `executor` and `model` are None for the stub."""

    runner: Runner
    scheduler: SchedulerConfig
    vocab_size: int
    executor: Executor | None = None
    model: ModelConfig | None = None


def build_engine(options: EngineOptions) -> BuiltEngine:
    """Load the model and make the runner. Slow.

    Raises LoadError when the model cannot be loaded, ValueError for options that do not fit it or each other, or a
    native executor that was insisted on and can not run here.
    """
    if options.engine == "stub":
        from engine_actor.stub_runner import StubRunner

        pages = options.kv_pages or STUB_PAGES
        return BuiltEngine(StubRunner(pages + 1), _limits(options, STUB_MODEL_LEN), STUB_VOCABULARY)

    import torch

    from engine_actor.async_runner import AsyncModelRunner
    from engine_actor.loading.checkpoint import load_checkpoint
    from engine_actor.models.layers import packed_bfloat16_available
    from engine_actor.runner import ModelRunner
    from engine_actor.torch_executor import TorchExecutor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    native = options.engine == "native" or options.quantization != "none"
    if native and options.engine == "torch":
        raise ValueError(f"quantization {options.quantization} needs engine native or auto, not torch")
    if native and (device != "cpu" or options.dtype not in ("auto", "bfloat16")):
        raise ValueError(
            f"engine native computes bfloat16 on a CPU, not {options.dtype} on {device}; engine auto or torch does"
        )
    if native and options.attention != "auto":
        raise ValueError(f"engine native has an attention of its own, not {options.attention}")
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if native or device == "cuda" or packed_bfloat16_available() else "float32"
    kv_bytes = options.kv_bytes
    if options.kv_pages is None and kv_bytes is None:
        kv_bytes = DEFAULT_CPU_KV_BYTES
        if device == "cuda":
            kv_bytes = int(DEFAULT_CUDA_KV_SHARE * torch.cuda.mem_get_info()[0])
    num_pages = None if options.kv_pages is None else options.kv_pages + 1
    threads = options.threads or available_cores()
    checkpoint = load_checkpoint(options.source, options.revision)
    executor: Executor | None = None
    reason = None
    may_be_native = options.engine == "auto" and options.attention == "auto" and device == "cpu"
    if native or (may_be_native and options.dtype in ("auto", "bfloat16")):
        executor, reason = _native_executor(checkpoint, num_pages, kv_bytes, threads, options.quantization)
        if native and executor is None:
            raise ValueError(f"engine native can not run here: {reason}")
    if executor is None:
        executor = TorchExecutor(
            checkpoint,
            dtype=dtype,
            num_pages=num_pages,
            kv_memory_bytes=kv_bytes,
            threads=threads,
            device=device,
            attention=options.attention,
            graph_rows=options.max_num_seqs,
        )
        if reason is not None:
            logger.warning("the torch executor is used, not the native one: %s", reason)
            reasons = [
                text for text in (f"no native executor: {reason}", executor.info.fallback_reason) if text
            ]
            executor.info = replace(executor.info, fallback_reason="; ".join(reasons))
    runner = ModelRunner(executor)
    if options.async_scheduling:
        if not isinstance(executor, TorchExecutor):
            raise ValueError(
                "async_scheduling gains nothing with the native executor, whose threads need the cores that schedule"
            )
        runner = AsyncModelRunner(executor)
    config = checkpoint.config
    return BuiltEngine(
        runner,
        _limits(options, config.max_position_embeddings),
        config.vocab_size,
        executor,
        config,
    )


def _native_executor(
    checkpoint: Checkpoint, num_pages: int | None, kv_bytes: int | None, threads: int, quantization: str
) -> tuple[Executor | None, str | None]:
    """The native executor once it has passed its probe, or None and why not."""
    from engine_actor.native.build import NativeUnavailable
    from engine_actor.native.executor import NativeExecutor
    from engine_actor.native.probe import probe

    try:
        probe(checkpoint.config, threads, quantization)
        executor = NativeExecutor(
            checkpoint,
            num_pages=num_pages,
            kv_memory_bytes=kv_bytes,
            threads=threads,
            quantization=quantization,
        )
        return executor, None
    except NativeUnavailable as error:
        return None, str(error)


def available_cores() -> int:
    """Cores this process may run on; Ray's own thread setting is not asked."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _limits(options: EngineOptions, context_length: int) -> SchedulerConfig:
    length = context_length if options.max_model_len is None else options.max_model_len
    if length > context_length:
        raise ValueError(f"max_model_len {length} is above the model's context length {context_length}")
    return SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=length,
        prefill_chunk_size=min(options.prefill_chunk_size, options.max_num_batched_tokens),
        kv_cache_utilization_limit=options.kv_cache_utilization_limit,
        kv_watermark=options.kv_watermark,
        prefix_caching=options.prefix_caching,
        request_level_batching=options.request_level_batching,
        prefill_first=options.prefill_first,
        async_scheduling=options.async_scheduling,
    )


def model_length(scheduler: SchedulerConfig, num_pages: int) -> int:
    """Longest prompt and output together, in tokens, that an engine can hold."""
    return min(scheduler.max_model_len, (num_pages - 1) * PAGE_SIZE)
