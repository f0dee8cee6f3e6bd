"""The roofline (Williams, Waterman, Patterson, 2009): how fast a run could be on this machine, and what was reached.

Counted is what a step can not do without: the products of its tokens with the weights, attention over what each token
sees, and one read of the weights, of every row's keys and values, and of what is written. The limit of a step is the
longer of the time to compute and the time to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_actor.loading.config import ModelConfig
from engine_actor.native.ceilings import Ceilings
from engine_actor.step import StepRecord

_KV_BYTES = 2
_BF16_BYTES = 2


@dataclass
class Work:
    """What the steps of a run had to do: operations, and bytes of memory."""

    linear_operations: float = 0.0
    attention_operations: float = 0.0
    bytes: float = 0.0
    compute_seconds: float = 0.0
    limit_seconds: float = 0.0


class Roofline:
    """Adds up steps of a model of bfloat16 or quantised weights on a CPU.

    `weight_bytes` are those of the layers and of the output layer in the smallest form that the executor keeps; None
    is bfloat16.
    """

    def __init__(
        self,
        config: ModelConfig,
        quantization: str,
        ceilings: Ceilings,
        weight_bytes: tuple[int, int] | None = None,
    ) -> None:
        self._config, self._ceilings = config, ceilings
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        attention = hidden * (query + 2 * key_value) + query * hidden
        self._layer_weights = config.num_layers * (attention + 3 * hidden * config.intermediate_size)
        self._output_weights = config.vocab_size * hidden
        self._layer_bytes, self._output_bytes = weight_bytes or (
            _BF16_BYTES * self._layer_weights,
            _BF16_BYTES * self._output_weights,
        )
        self._quantised = quantization != "none"
        self._token_bytes = 2 * config.num_layers * key_value * _KV_BYTES
        self._operations_per_key = 4 * query * config.num_layers

    def step(self, record: StepRecord) -> Work:
        """What one step had to do. Sliding windows are counted as if they were whole."""
        start, length = record.start.astype(np.float64), record.length.astype(np.float64)
        seen = float((length * start + length * (length + 1) / 2).sum())
        context, tokens, logits = float((start + length).sum()), record.num_tokens, len(record.logit_tokens)
        linear = 2.0 * (tokens * self._layer_weights + logits * self._output_weights)
        attention = self._operations_per_key * seen
        moved = self._layer_bytes + (context + tokens) * self._token_bytes
        if logits:
            moved += self._output_bytes
        peaks = self._ceilings
        compute = linear / (peaks.int8_operations if self._quantised else peaks.bf16_operations)
        compute += attention / peaks.bf16_operations
        return Work(linear, attention, moved, compute, max(compute, moved / peaks.memory_bytes))

    def report(self, records: list[StepRecord], seconds: float, output_tokens: int) -> dict[str, Any]:
        """The limit of a run of these steps that took `seconds`, and the fraction of it that was reached."""
        work = [self.step(record) for record in records]
        limit = sum(step.limit_seconds for step in work)
        return {
            "bf16_gflops": round(self._ceilings.bf16_operations / 1e9, 1),
            "int8_gops": round(self._ceilings.int8_operations / 1e9, 1),
            "memory_gb_per_s": round(self._ceilings.memory_bytes / 1e9, 1),
            "gflop": round(sum(step.linear_operations + step.attention_operations for step in work) / 1e9, 1),
            "gbyte": round(sum(step.bytes for step in work) / 1e9, 1),
            "limit_output_tokens_per_s": round(output_tokens / limit, 1),
            "fraction": round(limit / seconds, 3),
            "compute_fraction": round(sum(step.compute_seconds for step in work) / seconds, 3),
        }
