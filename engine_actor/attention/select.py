"""Which attention backend the torch executor gets: FlashInfer where it has shown that it works, else the reference."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from engine_actor.attention.base import AttentionBackend
from engine_actor.attention.flashinfer import Event, FlashInferBackend
from engine_actor.attention.reference import ReferenceBackend
from engine_actor.executor import PAGE_SIZE
from engine_actor.step import SamplingColumns, StepRecord

logger = logging.getLogger(__name__)

AttentionChoice = Literal["auto", "flashinfer", "reference"]

_MIN_CAPABILITY = (7, 5)
_TOLERANCE = 0.02  # of attention outputs of order one in bfloat16, against float32
_PROBE_STEPS = (((0, 33), (0, 5)), ((33, 1), (5, 5)), ((34, 1), (10, 1)))
"""(start, length) of two requests in three steps: prefill, a mixed step, and decode alone."""
_PROBE_TABLES = ((3, 1, 5), (2,))


@dataclass(frozen=True)
class AttentionShape:
    """What a backend must know of a model: each layer has `num_heads` query heads that share `num_kv_heads`.

    `scale` multiplies q · k, None for head_dim**-0.5; a token of the `sliding_layers` sees `sliding_window` tokens.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()


class AttentionUnavailable(RuntimeError):
    """A backend can not be used here; the message says why."""


def select_attention(
    choice: AttentionChoice,
    shape: AttentionShape,
    *,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AttentionBackend[Any], str | None]:
    """The backend for a model, and why it is not FlashInfer where a GPU would have wanted that.

    "auto" takes FlashInfer on CUDA once its probe has passed, else the reference. "flashinfer" insists: raises
    AttentionUnavailable with the reason.
    """
    reason = None
    if choice == "flashinfer" or (choice == "auto" and device.type == "cuda"):
        try:
            module = import_flashinfer(device)
            probe(module, shape, dtype=dtype, device=device)
            return _flashinfer(module, shape, num_pages, dtype, device), None
        except AttentionUnavailable as error:
            if choice == "flashinfer":
                raise
            reason = str(error)
            logger.warning("attention by the reference backend, not by FlashInfer: %s", reason)
    return _reference(shape, num_pages, dtype, device), reason


def _flashinfer(
    module: ModuleType,
    shape: AttentionShape,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    make_event: Callable[[], Event] = torch.cuda.Event,
) -> FlashInferBackend:
    return FlashInferBackend(
        module,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_pages=num_pages,
        dtype=dtype,
        device=device,
        scale=shape.scale,
        sliding_window=shape.sliding_window,
        sliding_layers=shape.sliding_layers,
        make_event=make_event,
    )


def _reference(
    shape: AttentionShape, num_pages: int, dtype: torch.dtype, device: torch.device
) -> ReferenceBackend:
    return ReferenceBackend(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_pages=num_pages,
        dtype=dtype,
        device=device,
        scale=shape.scale,
        sliding_window=shape.sliding_window,
        sliding_layers=shape.sliding_layers,
    )


def import_flashinfer(device: torch.device) -> ModuleType:
    """The package, on a device that its kernels run on. Raises AttentionUnavailable."""
    if device.type != "cuda":
        raise AttentionUnavailable(f"FlashInfer needs a CUDA device, not {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        raise AttentionUnavailable(f"compute capability {capability} is below {_MIN_CAPABILITY}")
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # whatever a package does on import must not end the engine
        raise AttentionUnavailable(f"import flashinfer: {error}; pip install 'evenhand[gpu]'") from error


def probe(
    module: ModuleType,
    shape: AttentionShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make_event: Callable[[], Event] = torch.cuda.Event,
) -> None:
    """Compare a ragged prefill, a mixed step and a decode step with the reference in float32, at the model's heads.

    The first use of a kernel may compile it, which takes up to minutes. Raises AttentionUnavailable.
    """
    # One layer without a window and, of a model that has one, one with.
    windows = 1 + bool(shape.sliding_layers)
    small = replace(shape, num_layers=windows, sliding_layers=tuple(range(1, windows)))
    num_pages = 1 + max(map(max, _PROBE_TABLES))
    try:
        backend = _flashinfer(module, small, num_pages, dtype, device, make_event)
        exact = _reference(small, num_pages, torch.float32, device)
        generator = torch.Generator().manual_seed(0)
        for rows in _PROBE_STEPS:
            record = _probe_record(rows)
            q, k, v = (
                torch.randn(record.num_tokens, heads, shape.head_dim, generator=generator).to(device, dtype)
                for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            )
            metadata, exact_metadata = backend.prepare(record), exact.prepare(record)
            for layer in range(windows):
                got = backend.forward(layer, q, k, v, metadata).float()
                expected = exact.forward(layer, q.float(), k.float(), v.float(), exact_metadata)
                error = float((got - expected).abs().max())
                if not error < _TOLERANCE:
                    raise AttentionUnavailable(f"its result is not the reference's (difference {error:.3g})")
    except AttentionUnavailable:
        raise
    except Exception as error:  # a missing compiler, a kernel that does not load: all of it means "not here"
        raise AttentionUnavailable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _probe_record(rows: tuple[tuple[int, int], ...]) -> StepRecord:
    start = np.array([first for first, _ in rows], np.int32)
    length = np.array([tokens for _, tokens in rows], np.int32)
    tables = [
        table[: -(-(first + tokens) // PAGE_SIZE)]
        for (first, tokens), table in zip(rows, _PROBE_TABLES, strict=True)
    ]
    ones = np.ones(len(rows), np.float32)
    return StepRecord(
        epoch=0,
        step=0,
        request=np.arange(len(rows), dtype=np.int32),
        request_epoch=np.zeros(len(rows), np.int32),
        start=start,
        length=length,
        is_last_chunk=np.ones(len(rows), np.bool_),
        token_ids=np.zeros(int(length.sum()), np.int32),
        token_indptr=np.cumsum([0, *length]).astype(np.int32),
        page_indices=np.array([page for table in tables for page in table], np.int32),
        page_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        sampling=SamplingColumns(
            temperature=0 * ones,
            top_k=np.zeros(len(rows), np.int32),
            top_p=ones,
            seed=np.zeros(len(rows), np.uint64),
            position=start + length,
        ),
    )
