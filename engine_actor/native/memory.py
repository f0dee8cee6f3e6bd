"""Memory in huge pages: weights and KV are read from end to end, and small pages cost a third of the bandwidth."""

from __future__ import annotations

import mmap

import torch

_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in memory of its own; pages are taken when they are first written."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(_pages(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


class Arena:
    """Copies of tensors side by side at 64-byte borders. Lives as long as what points into it is used."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def keep(self, tensor: torch.Tensor) -> int:
        """Copy a tensor; returns the address of the copy."""
        size = -(-tensor.numel() * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not self._chunks or self._used + size > len(self._chunks[-1]):
            self._chunks.append(zeros((max(size, _CHUNK_BYTES),), torch.uint8))
            self._used = 0
        place = self._chunks[-1][self._used : self._used + tensor.numel() * tensor.dtype.itemsize]
        place.view(tensor.dtype).copy_(tensor.reshape(-1))
        self._used += size
        return place.data_ptr()


def _pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
