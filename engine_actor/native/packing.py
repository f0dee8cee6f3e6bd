"""Weights in the layouts of the native kernels (`Weight` in src/kernels.h), quantised on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL = 32
LANES = 16
INT4_BLOCK = 32
INT8_GROUP = 64
BF16, INT8, INT4 = range(3)
_INT4_LEVELS = range(15, 6, -1)


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k]: `data` and `scales` as the kernels read them, `scales` None in bfloat16."""

    data: torch.Tensor
    scales: torch.Tensor | None
    n: int
    k: int
    format: int


def pack(weight: torch.Tensor, form: int) -> PackedWeight:
    """A weight [n, k] in one of the formats; k even, for INT8 a multiple of 64, for INT4 of 32."""
    n, k = weight.shape
    if form == BF16:
        data = _panels(weight.bfloat16(), 2)
        return PackedWeight(data, None, n, k, form)
    if form == INT8:
        values, scale = quantise_int8(weight)
        data = _panels((values + 128).to(torch.uint8), 4, fill=128)
        return PackedWeight(data, _padded(scale[:, None], 0).view(-1), n, k, form)
    nibbles, factor, minimum = quantise_int4(weight)
    quads = _panels(nibbles, 4).view(-1, k // INT4_BLOCK, 4, 2, PANEL, 4)
    data = quads[:, :, :, 0] | quads[:, :, :, 1] << 4
    scales = torch.stack([_panels(part, 1).squeeze(-1) for part in (factor, minimum)], dim=2)
    return PackedWeight(data.contiguous(), scales.contiguous(), n, k, form)


def quantise_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 values -127 .. 127 of [n, k], and the float32 factor [n] of each row."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127.0
    values = torch.round(weight / scale.clamp_min(1e-30)[:, None])
    return values.to(torch.int16), scale


def quantise_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 .. 15 (uint8 [n, k]), and float16 factor and minimum of each block of 32 values, [n, k / 32].

    The number of levels between a block's least and greatest value is the one with the smallest error. Blocks that
    are of four bits already, as Q4_0 and Q4_1 of a GGUF file, come out as they are.
    """
    blocks = weight.float().view(weight.shape[0], -1, INT4_BLOCK)
    least, greatest = blocks.amin(dim=-1), blocks.amax(dim=-1)
    minimum = least.half()
    best: list[torch.Tensor] = []
    for levels in _INT4_LEVELS:
        factor = ((greatest - least) / levels).half()
        divisor = factor.float().clamp_min(1e-30)[..., None]
        values = torch.round((blocks - minimum.float()[..., None]) / divisor).clamp_(0, 15)
        error = (
            (values * factor.float()[..., None] + minimum.float()[..., None] - blocks).square_().sum(dim=-1)
        )
        if not best:
            best = [error, values, factor]
            continue
        better = error < best[0]
        best[0] = torch.where(better, error, best[0])
        best[1] = torch.where(better[..., None], values, best[1])
        best[2] = torch.where(better, factor, best[2])
        if not best[0].any():
            break
    return best[1].to(torch.uint8).view(weight.shape), best[2], minimum


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of two weights [n, k] in turns of 16: [2 n, k]."""
    k = gate.shape[1]
    return torch.stack((gate.view(-1, LANES, k), up.view(-1, LANES, k)), dim=1).reshape(-1, k)


def _padded(weight: torch.Tensor, fill: int) -> torch.Tensor:
    missing = -weight.shape[0] % PANEL
    if not missing:
        return weight
    return torch.cat((weight, torch.full((missing, weight.shape[1]), fill, dtype=weight.dtype)))


def _panels(weight: torch.Tensor, run: int, fill: int = 0) -> torch.Tensor:
    """[n, k] as [ceil(n / 32), k / run, 32, run]; missing rows are `fill`."""
    k = weight.shape[1]
    return _padded(weight, fill).view(-1, PANEL, k // run, run).transpose(1, 2).contiguous()
