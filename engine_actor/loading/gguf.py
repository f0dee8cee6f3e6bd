"""Weights of a GGUF file under their Hugging Face names, dequantised to float32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine_actor.loading.config import ModelConfig
from engine_actor.loading.gguf_header import GgufHeader, GgufTensorInfo
from engine_actor.loading.layout import EMBEDDING, OUTPUT, ROPE_FREQUENCY_FACTORS
from engine_actor.loading.source import LoadError

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")

_TOP_LEVEL = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": OUTPUT,
    "rope_freqs.weight": ROPE_FREQUENCY_FACTORS,
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufWeights:
    """Tensors of one file; each is read and dequantised when asked for."""

    def __init__(self, path: Path, header: GgufHeader, config: ModelConfig) -> None:
        """Raises LoadError, naming the tensors, for an unsupported type or a file that ends inside one."""
        self._path = path
        self._config = config
        in_block = _IN_BLOCK | (_POST_NORMS if config.post_norms else {})
        self._infos = {_hf_name(name, in_block): info for name, info in header.tensors.items()}
        # Only this architecture has its q and k rows in the order of another rotation.
        self._permuted = header.metadata.get("general.architecture") == "llama"
        self.shapes = {name: info.shape for name, info in self._infos.items()}
        self._check()
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def _check(self) -> None:
        refused = [
            f"{info.name} ({_type_name(info)})" for info in self._infos.values() if not _supported(info)
        ]
        if refused:
            raise LoadError(
                f"{self._path}: tensor types not supported: {', '.join(refused)} "
                f"(supported: {', '.join(SUPPORTED_TYPES)})"
            )
        size = self._path.stat().st_size
        cut = [info.name for info in self._infos.values() if info.offset + _num_bytes(info) > size]
        if cut:
            raise LoadError(f"{self._path}: the file ends before the data of {', '.join(cut)}")

    def read(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name, float32."""
        info = self._infos[name]
        raw = self._data[info.offset : info.offset + _num_bytes(info)]
        values = dequantize(_as_rows(raw, info), GGMLQuantizationType(info.ggml_type))
        tensor = torch.from_numpy(np.array(values, dtype=np.float32).reshape(info.shape))
        if self._permuted and name.endswith("q_proj.weight"):
            return _unpermute(tensor, self._config.num_heads)
        if self._permuted and name.endswith("k_proj.weight"):
            return _unpermute(tensor, self._config.num_kv_heads)
        if name.endswith("norm.weight"):
            return tensor - self._config.norm_offset  # the file has it added already
        return tensor


def _hf_name(name: str, in_block: Mapping[str, str]) -> str:
    block = _BLOCK_NAME.fullmatch(name)
    if block and block[2] in in_block:
        return f"model.layers.{block[1]}.{in_block[block[2]]}.{block[3]}"
    return _TOP_LEVEL.get(name, name)


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the file's order of q/k rows: it rotates neighbours 2i and 2i + 1, we rotate i and i + dim / 2."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _type_name(info: GgufTensorInfo) -> str:
    try:
        return GGMLQuantizationType(info.ggml_type).name
    except ValueError:
        return f"type {info.ggml_type}"


def _supported(info: GgufTensorInfo) -> bool:
    return _type_name(info) in SUPPORTED_TYPES


def _num_bytes(info: GgufTensorInfo) -> int:
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
    return int(np.prod(info.shape, dtype=np.int64)) // per_block * block_bytes


def _as_rows(raw: np.ndarray, info: GgufTensorInfo) -> np.ndarray:
    """Bytes in the form that the dequantiser wants: plain floats typed, everything else as bytes per row."""
    kind = GGMLQuantizationType(info.ggml_type)
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32)
    if kind == GGMLQuantizationType.F16:
        return raw.view(np.float16)
    return raw.reshape(*info.shape[:-1], -1)
