"""The decoder: Llama, Mistral, Qwen 2 and 3, Gemma 3, over an attention backend.

One definition for all: where a family departs from Llama, the configuration says so and one line here does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine_actor.attention.base import AttentionBackend
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.layout import EMBEDDING, OUTPUT, ROPE_FREQUENCY_FACTORS
from engine_actor.models.layers import (
    Angles,
    Linear,
    gated,
    make_linear,
    rms_norm,
    rope_angles,
    rope_frequencies,
    rotate,
    softcap,
)


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one block: q, k, v and gate, up each fused into one product.

    The four norms stand where their names say; those that a family does not have are None.
    """

    before_attention: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    after_attention: torch.Tensor | None
    before_mlp: torch.Tensor
    gate_up: Linear
    down: Linear
    after_mlp: torch.Tensor | None
    local: bool


class Decoder:
    """Computes logits of a step. The residual stream and the norms stay in float32 whatever the type of the
    weights: it costs little, and brings bfloat16 nearer to float32."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Reads the weights of a checked checkpoint, one tensor at a time."""
        self.config = config = checkpoint.config
        weights = checkpoint.weights

        def read(name: str) -> torch.Tensor:
            return weights.read(name).to(device=device, dtype=dtype)

        def norm(name: str) -> torch.Tensor:
            return weights.read(f"{name}.weight").to(device=device, dtype=torch.float32) + config.norm_offset

        def linear(prefix: str, *names: str, bias: bool = False) -> Linear:
            weight = torch.cat([read(f"{prefix}{name}.weight") for name in names])
            return make_linear(
                weight, torch.cat([read(f"{prefix}{name}.bias") for name in names]) if bias else None
            )

        def layer(index: int) -> DecoderLayer:
            prefix = f"model.layers.{index}."
            attention, post_norms = prefix + "self_attn.", config.post_norms
            # Where norms follow attention and MLP too, the name of the second Llama norm is the first of those.
            before_mlp = "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm"
            return DecoderLayer(
                before_attention=norm(prefix + "input_layernorm"),
                qkv=linear(attention, "q_proj", "k_proj", "v_proj", bias=config.qkv_bias),
                q_norm=norm(attention + "q_norm") if config.qk_norm else None,
                k_norm=norm(attention + "k_norm") if config.qk_norm else None,
                output=linear(attention, "o_proj"),
                after_attention=norm(prefix + "post_attention_layernorm") if post_norms else None,
                before_mlp=norm(prefix + before_mlp),
                gate_up=linear(prefix + "mlp.", "gate_proj", "up_proj"),
                down=linear(prefix + "mlp.", "down_proj"),
                after_mlp=norm(prefix + "post_feedforward_layernorm") if post_norms else None,
                local=index in config.sliding_layers,
            )

        factors = weights.read(ROPE_FREQUENCY_FACTORS) if ROPE_FREQUENCY_FACTORS in weights.shapes else None
        self._frequencies = rope_frequencies(config, factors).to(device)
        self._local_frequencies = rope_frequencies(config, factors, local=True).to(device)
        self._embedding = read(EMBEDDING)
        self._layers = [layer(index) for index in range(config.num_layers)]
        self._norm = norm("model.norm")
        self._output = make_linear(self._embedding if config.tie_word_embeddings else read(OUTPUT))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        attention: AttentionBackend[Any],
        metadata: Any,
    ) -> torch.Tensor:
        """Compute T tokens of a step, writing their KV through the attention backend.

        token_ids and positions are int64 [T], logit_tokens int64 [L] indexes into them.
        Returns float32 [L, vocab].
        """
        config, eps, dtype = self.config, self.config.rms_norm_eps, self._embedding.dtype
        angles = rope_angles(positions, self._frequencies)
        local_angles = rope_angles(positions, self._local_frequencies) if config.sliding_layers else angles
        hidden = F.embedding(token_ids, self._embedding).float() * config.embedding_scale
        for index, layer in enumerate(self._layers):
            x = rms_norm(hidden, layer.before_attention, eps).to(dtype)
            q, k, v = self._split_heads(layer, layer.qkv(x), local_angles if layer.local else angles)
            attended = layer.output(attention.forward(index, q, k, v, metadata).flatten(1))
            if layer.after_attention is not None:
                attended = rms_norm(attended.float(), layer.after_attention, eps)
            hidden += attended
            x = rms_norm(hidden, layer.before_mlp, eps).to(dtype)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            x = layer.down(gated(gate, up, config.activation))
            if layer.after_mlp is not None:
                x = rms_norm(x.float(), layer.after_mlp, eps)
            hidden += x
        x = rms_norm(hidden[logit_tokens], self._norm, eps).to(dtype)
        logits = self._output(x).float()
        return logits if config.logit_softcap is None else softcap(logits, config.logit_softcap)

    def _split_heads(
        self, layer: DecoderLayer, qkv: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [T, (heads + 2 * kv_heads) * head_dim] to rotated q and k, and v, each [T, heads, head_dim]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        by_head = qkv.view(qkv.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        if layer.q_norm is None or layer.k_norm is None:
            rotated = rotate(by_head[:, : heads + kv_heads], angles)
            return rotated[:, :heads], rotated[:, heads:], by_head[:, heads + kv_heads :]
        eps = self.config.rms_norm_eps
        q = rotate(rms_norm(by_head[:, :heads].float(), layer.q_norm, eps), angles)
        k = rotate(rms_norm(by_head[:, heads : heads + kv_heads].float(), layer.k_norm, eps), angles)
        return q.to(qkv.dtype), k.to(qkv.dtype), by_head[:, heads + kv_heads :]
