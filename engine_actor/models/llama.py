"""The Llama family (Llama, Mistral): a decoder over an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine_actor.attention.base import AttentionBackend
from engine_actor.loading.checkpoint import Checkpoint
from engine_actor.loading.layout import EMBEDDING, OUTPUT, ROPE_FREQUENCY_FACTORS
from engine_actor.models.layers import Linear, RotaryEmbedding, make_linear, rms_norm


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one block: q, k, v and gate, up each fused into one product."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Computes logits of a step. The residual stream and the norms stay in float32 whatever the type of the
    weights: it costs little, and brings bfloat16 nearer to float32."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Reads the weights of a checked checkpoint, one tensor at a time."""
        self.config = checkpoint.config
        weights = checkpoint.weights

        def read(name: str, as_dtype: torch.dtype = dtype) -> torch.Tensor:
            return weights.read(name).to(device=device, dtype=as_dtype)

        def fused(prefix: str, *names: str) -> Linear:
            return make_linear(torch.cat([read(f"{prefix}{name}.weight") for name in names]))

        factors = weights.read(ROPE_FREQUENCY_FACTORS) if ROPE_FREQUENCY_FACTORS in weights.shapes else None
        self._rotary = RotaryEmbedding(self.config, factors, device)
        self._embedding = read(EMBEDDING)
        self._layers: list[LlamaLayer] = []
        for index in range(self.config.num_layers):
            prefix = f"model.layers.{index}."
            self._layers.append(
                LlamaLayer(
                    input_norm=read(prefix + "input_layernorm.weight", torch.float32),
                    qkv=fused(prefix + "self_attn.", "q_proj", "k_proj", "v_proj"),
                    output=fused(prefix + "self_attn.", "o_proj"),
                    post_attention_norm=read(prefix + "post_attention_layernorm.weight", torch.float32),
                    gate_up=fused(prefix + "mlp.", "gate_proj", "up_proj"),
                    down=fused(prefix + "mlp.", "down_proj"),
                )
            )
        self._norm = read("model.norm.weight", torch.float32)
        self._output = make_linear(self._embedding if self.config.tie_word_embeddings else read(OUTPUT))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        attention: AttentionBackend[Any],
        metadata: Any,
    ) -> torch.Tensor:
        """Compute T tokens of a step, writing their KV through the attention backend.

        token_ids and positions are int64 [T], logit_tokens int64 [S] indexes into them.
        Returns float32 [S, vocab].
        """
        eps = self.config.rms_norm_eps
        dtype = self._embedding.dtype
        angles = self._rotary.angles(positions)
        hidden = F.embedding(token_ids, self._embedding).float()
        for index, layer in enumerate(self._layers):
            x = rms_norm(hidden, layer.input_norm, eps).to(dtype)
            q, k, v = self._split_heads(layer.qkv(x), angles)
            attended = attention.forward(index, q, k, v, metadata)
            hidden += layer.output(attended.flatten(1))
            x = rms_norm(hidden, layer.post_attention_norm, eps).to(dtype)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate) * up)
        x = rms_norm(hidden[logit_tokens], self._norm, eps).to(dtype)
        return self._output(x).float()

    def _split_heads(
        self, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [T, (heads + 2 * kv_heads) * head_dim] to rotated q and k, and v, each [T, heads, head_dim]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        by_head = qkv.view(qkv.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        rotated = self._rotary.rotate(by_head[:, : heads + kv_heads], angles)
        return rotated[:, :heads], rotated[:, heads:], by_head[:, heads + kv_heads :]
