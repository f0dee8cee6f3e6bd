"""Between the host and the device that computes, without one waiting for the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine_actor.step import StepRecord


def staged(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The values in memory of the host from which `device` copies behind what it computes.

    A copy from memory that is not pinned would wait for a GPU. On a CPU the array's own memory is used.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the values on `device`; on a CPU it shares the array's memory."""
    return staged(values, device).to(device, non_blocking=True)


def download(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Copy a tensor to the host behind what its device is to compute now; what is returned waits for the copy."""
    if values.device.type == "cpu":
        return values.numpy
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> np.ndarray:
        copied.synchronize()
        return copy.numpy()

    return wait


def fill_in(token_ids: torch.Tensor, record: StepRecord, sampled: torch.Tensor | None) -> None:
    """Put the tokens `sampled` [S] by the step before where the record's `token_ids` [T] are negative, in place."""
    unknown = np.flatnonzero(record.token_ids < 0)
    if len(unknown):
        assert sampled is not None
        rows = upload((-1 - record.token_ids[unknown]).astype(np.int64), token_ids.device)
        token_ids[upload(unknown, token_ids.device)] = sampled[rows].to(token_ids.dtype)
