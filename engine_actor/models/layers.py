"""Pieces that decoder families share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine_actor.loading.config import ModelConfig, RopeScaling

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] to [rows, out], same type."""

# The weight layout is chosen for about this many rows; measured, it is also good for one.
_PACKED_ROWS = 256


def packed_bfloat16_available() -> bool:
    """Whether oneDNN can hold bfloat16 weights in its own layout on this machine (about 1.5 times as
    fast)."""
    operators = torch.ops.mkldnn
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
        and operators._is_mkldnn_bf16_supported()
    )


def make_linear(weight: torch.Tensor) -> Linear:
    """A linear layer without bias from its weight [out, in], packed for oneDNN where that is possible."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packed_bfloat16_available():
        operators = torch.ops.mkldnn
        packed = operators._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
        return lambda x: operators._linear_pointwise(x, packed, None, "none", [], "")
    return lambda x: F.linear(x, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last axis; x and weight in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class RotaryEmbedding:
    """Rotary position embedding (Su et al., RoFormer), pairing element i with i + head_dim / 2.

    Angles are computed in float32 for the positions of each step, so there is no table to outgrow.
    """

    def __init__(
        self, config: ModelConfig, frequency_factors: torch.Tensor | None, device: torch.device
    ) -> None:
        """`frequency_factors` [head_dim / 2] divide the frequencies (GGUF files of Llama 3.1 and later)."""
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponent
        if frequency_factors is not None:
            frequencies = frequencies / frequency_factors.float()
        if config.rope_scaling is not None:
            frequencies = _scaled(frequencies, config.rope_scaling)
        self.frequencies = frequencies.to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each float32 [T, 1, head_dim / 2], for positions [T]."""
        angle = positions.float()[:, None, None] * self.frequencies
        return angle.cos(), angle.sin()

    @staticmethod
    def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate x [T, heads, head_dim] in float32; returns the type of x."""
        cos, sin = angles
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: long waves are stretched, short ones kept, those between interpolated by wavelength.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)
