"""Weights in the layouts of the native kernels (`Weight` in src/kernels.h), quantised on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL = 32
LANES = 16
INT4_BLOCK = 32
INT8_GROUP = 64
BF16, INT8, INT4 = range(3)
NIBBLES, BYTES = 1, 2
_INT4_LEVELS = range(15, 6, -1)


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks of 32 values as the kernels read them, in one of the formats NIBBLES and BYTES."""

    data: torch.Tensor
    scales: torch.Tensor
    format: int


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k]: `data` and `scales` as the kernels read them, `scales` None in bfloat16.

    `blocks` has the values of a bfloat16 weight a second time, in fewer bytes, where that is possible.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    n: int
    k: int
    format: int
    blocks: PackedBlocks | None = None

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest form that gives all values."""
        if self.blocks is not None:
            return self.blocks.data.nbytes + self.blocks.scales.nbytes
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pack(weight: torch.Tensor, form: int) -> PackedWeight:
    """A weight [n, k] in one of the formats; k even, for INT8 a multiple of 64, for INT4 of 32."""
    n, k = weight.shape
    if form == BF16:
        data = _panels(weight.bfloat16(), 2)
        return PackedWeight(data, None, n, k, form, pack_blocks(weight))
    if form == INT8:
        values, scale = quantise_int8(weight)
        data = _panels((values + 128).to(torch.uint8), 4, fill=128)
        return PackedWeight(data, _padded(scale[:, None], 0).view(-1), n, k, form)
    data, scales = _pack_nibbles(*quantise_int4(weight))
    return PackedWeight(data, scales, n, k, form)


def pack_blocks(weight: torch.Tensor) -> PackedBlocks | None:
    """A weight [n, k] as blocks that, rounded to bfloat16, give what the weight rounded to bfloat16 is.

    Weights from a GGUF file of type Q4_0, Q4_1 or Q8_0 are such blocks; None for others.
    """
    if weight.shape[1] % INT4_BLOCK or weight.dtype != torch.float32:
        return None
    exact = weight.bfloat16()
    # The first rows tell: others are quickly refused.
    for find in (_find_nibbles, _find_bytes):
        if find(weight[:PANEL], exact[:PANEL]) is not None:
            return find(weight, exact)
    return None


def _find_nibbles(weight: torch.Tensor, exact: torch.Tensor) -> PackedBlocks | None:
    nibbles, factor, minimum = quantise_int4(weight)
    blocks = (
        nibbles.view(len(weight), -1, INT4_BLOCK) * factor.float()[..., None] + minimum.float()[..., None]
    )
    if not torch.equal(blocks.view(weight.shape).bfloat16(), exact):
        return None
    return PackedBlocks(*_pack_nibbles(nibbles, factor, minimum), NIBBLES)


def _find_bytes(weight: torch.Tensor, exact: torch.Tensor) -> PackedBlocks | None:
    blocks = weight.view(len(weight), -1, INT4_BLOCK)
    factor = (blocks.abs().amax(dim=-1) / 127.0).half()
    values = torch.round(blocks / factor.float().clamp_min(1e-30)[..., None]).clamp_(-127, 127)
    if not torch.equal((values * factor.float()[..., None]).view(weight.shape).bfloat16(), exact):
        return None
    data = _panels(values.to(torch.int8).view(weight.shape), 1)
    return PackedBlocks(data, _panels(factor, 1), BYTES)


def _pack_nibbles(
    nibbles: torch.Tensor, factor: torch.Tensor, minimum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    quads = _panels(nibbles, 4).view(-1, nibbles.shape[1] // INT4_BLOCK, 4, 2, PANEL, 4)
    data = quads[:, :, :, 0] | quads[:, :, :, 1] << 4
    scales = torch.stack([_panels(part, 1).squeeze(-1) for part in (factor, minimum)], dim=2)
    return data.contiguous(), scales.contiguous()


def quantise_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 values -127 .. 127 of [n, k], and the float32 factor [n] of each row."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127.0
    values = torch.round(weight / scale.clamp_min(1e-30)[:, None])
    return values.to(torch.int16), scale


def quantise_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 .. 15 (uint8 [n, k]), and float16 factor and minimum of each block of 32 values, [n, k / 32].

    The number of levels between a block's ends is the one with the smallest error. Blocks that are of four bits
    already, as Q4_0 and Q4_1 of a GGUF file, come out as they are; a factor may be negative.
    """
    blocks = weight.float().reshape(-1, INT4_BLOCK)
    least, greatest = blocks.amin(dim=-1), blocks.amax(dim=-1)
    minimum, factor = least.half(), torch.zeros(len(blocks), dtype=torch.float16)
    values = torch.zeros(blocks.shape, dtype=torch.uint8)
    error = torch.full((len(blocks),), torch.inf)
    # From the least value up; Q4_0 has its exact end where the magnitude is largest, so from the greatest down too.
    for first, last, tried in ((least, greatest, error > 0), (greatest, least, greatest > -least)):
        for levels in _INT4_LEVELS:
            left = torch.nonzero(tried & (error > 0)).view(-1)
            if not len(left):
                break
            start = first[left].half()
            step = ((last[left] - first[left]) / levels).half()
            wide = step.float()[:, None]
            divisor = torch.where(wide.abs() > 1e-30, wide, 1e-30)
            values_left = torch.round((blocks[left] - start.float()[:, None]) / divisor).clamp_(0, 15)
            error_left = (values_left * wide + start.float()[:, None] - blocks[left]).square_().sum(dim=-1)
            better = error_left < error[left]
            at = left[better]
            error[at], factor[at], minimum[at] = error_left[better], step[better], start[better]
            values[at] = values_left[better].to(torch.uint8)
    shape = (weight.shape[0], -1)
    return values.view(weight.shape), factor.view(shape), minimum.view(shape)


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
