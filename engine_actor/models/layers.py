"""Pieces that decoder families share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine_actor.loading.config import Activation, ModelConfig, RopeScaling

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] to [rows, out], same type."""

Angles = tuple[torch.Tensor, torch.Tensor]

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


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer from its weight [out, in], packed for oneDNN where that is possible."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packed_bfloat16_available():
        operators = torch.ops.mkldnn
        packed = operators._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
        return lambda x: operators._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last axis; x and weight in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up: SwiGLU or GeGLU (Shazeer, "GLU variants improve transformer", 2020)."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x bounded to (-cap, cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def rope_frequencies(
    config: ModelConfig, frequency_factors: torch.Tensor | None = None, *, local: bool = False
) -> torch.Tensor:
    """Radians per position of each pair of elements, float32 [head_dim / 2]; `local`: of sliding layers.

    `frequency_factors` [head_dim / 2] divide them (GGUF files of Llama 3.1 and later).
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, None
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / theta**exponent
    if frequency_factors is not None:
        frequencies = frequencies / frequency_factors.float()
    return frequencies if scaling is None else _scaled(frequencies, scaling, theta)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        # Long waves are stretched, short ones kept, those between interpolated by their turns in the context.
        kept = (context * frequencies / (2 * math.pi) - low) / (high - low)
    else:  # yarn interpolates by the index of the pair, between the whole indexes around the two limits
        dim = 2 * len(frequencies)

        def index(turns: float) -> float:
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = max(math.floor(index(high)), 0), min(math.ceil(index(low)), dim - 1)
        kept = 1.0 - (torch.arange(dim // 2) - first) / max(last - first, 0.001)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)


def rope_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> Angles:
    """Cosine and sine, each float32 [T, 1, head_dim / 2], for positions [T].

    Computed for the positions of each step, so there is no table to outgrow.
    """
    angle = positions.float()[:, None, None] * frequencies
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotary position embedding (Su et al., RoFormer), pairing element i with i + head_dim / 2.

    x is [T, heads, head_dim]; computed in float32, returned in the type of x.
    """
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
