"""GGUF files: names, types, the order of q/k rows, and every way in which a file can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine_actor.loading.checkpoint import load_checkpoint
from engine_actor.loading.gguf_header import read_gguf_header
from engine_actor.loading.read_config import read_model_config
from engine_actor.loading.source import LoadError, ResolvedSource
from engine_actor.torch_executor import TorchExecutor

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 256, 256, 64, 4, 2
DOWN = "model.layers.0.mlp.down_proj.weight"
QUANTISABLE = (Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0)


def write_gguf(
    path: Path,
    *,
    layers: int = 1,
    tensors: dict[str, Any] | None = None,
    types: dict[str, Type] | None = None,
    heads: int = HEADS,
    architecture: str = "llama",
    extra: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """A small random model; `tensors` replaces (None: leaves out) some. Returns what was written."""
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    head_dim = HIDDEN // heads
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    data: dict[str, Any] = {name: random.normal(0, 0.1, shape) for name, shape in shapes.items()}
    data |= tensors or {}
    data = {name: value.astype(np.float32) for name, value in data.items() if value is not None}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in data.items():
        kind = (types or {}).get(name, Type.F32)
        packed = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return data


def load_error(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load_checkpoint(str(path))
    return str(caught.value)


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda kind: kind.name)
def test_each_type_reads_back_what_was_stored(tmp_path: Path, kind: Type) -> None:
    written = write_gguf(tmp_path / "m.gguf", types={"blk.0.ffn_down.weight": kind})["blk.0.ffn_down.weight"]
    read = load_checkpoint(str(tmp_path / "m.gguf")).weights.read(DOWN)
    assert read.dtype == torch.float32 and read.shape == (HIDDEN, INNER)
    exact = gguf.quants.dequantize(gguf.quants.quantize(written, kind), kind)
    assert torch.equal(read, torch.from_numpy(exact.astype(np.float32)))
    coarseness = {Type.F32: 0.0, Type.F16: 1e-3, Type.BF16: 4e-3, Type.Q8_0: 0.01}.get(kind, 0.15)
    assert np.abs(read.numpy() - written).max() <= coarseness * np.abs(written).max()


def q4_k_value(block: bytes, i: int) -> float:
    d, dmin = struct.unpack("<ee", block[:4])
    scales, sub = block[4:16], i // 32
    if sub < 4:
        scale, least = scales[sub] & 63, scales[sub + 4] & 63
    else:
        scale = (scales[sub + 4] & 15) | (scales[sub - 4] >> 6) << 4
        least = (scales[sub + 4] >> 4) | (scales[sub] >> 6) << 4
    byte = block[16 + i // 64 * 32 + i % 32]
    return d * scale * (byte >> 4 if i % 64 >= 32 else byte & 15) - dmin * least


def q6_k_value(block: bytes, i: int) -> float:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    half, quarter, lane = i // 128, i % 128 // 32, i % 32
    byte = low[half * 64 + lane + 32 * (quarter % 2)]
    nibble = byte >> 4 if quarter >= 2 else byte & 15
    bits = high[half * 32 + lane] >> (2 * quarter) & 3
    return struct.unpack("<e", block[208:])[0] * scales[i // 16] * ((nibble | bits << 4) - 32)


@pytest.mark.parametrize(
    ("kind", "block_bytes", "value_at"),
    [(Type.Q4_K, 144, q4_k_value), (Type.Q6_K, 210, q6_k_value)],
    ids=["Q4_K", "Q6_K"],
)
def test_super_block_types_read_as_their_layout_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Type, block_bytes: int, value_at: Any
) -> None:
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (HIDDEN, block_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    places = (slice(0, 2), slice(2, 4)) if kind == Type.Q4_K else (slice(208, 210),)
    for place in places:
        blocks[:, place] = scale
    plain = gguf.quants.quantize
    monkeypatch.setattr(gguf.quants, "quantize", lambda x, k: blocks if k == kind else plain(x, k))
    write_gguf(tmp_path / "m.gguf", types={"blk.0.ffn_down.weight": kind})
    read = load_checkpoint(str(tmp_path / "m.gguf")).weights.read(DOWN)
    for row in (0, 100, 255):
        expected = [value_at(blocks[row].tobytes(), i) for i in range(256)]
        np.testing.assert_allclose(read[row].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_unsupported_type_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", types={"blk.0.ffn_down.weight": Type.Q5_1})
    message = load_error(tmp_path / "m.gguf")
    assert "blk.0.ffn_down.weight (Q5_1)" in message and "Q4_1" in message


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_permuted_rows_compute_what_transformers_computes(
    tmp_path: Path, make_record, make_row, tied
) -> None:
    """Rows are permuted here as llama.cpp's converter does it; the answer is that of the plain weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not tied:
        tensors["output.weight"] = state["lm_head.weight"]
    for layer in range(2):
        for short, long in names.items():
            weight = state[f"model.layers.{layer}.{long}.weight"]
            if short in ("attn_q", "attn_k"):
                heads = HEADS if short == "attn_q" else KV_HEADS
                pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{short}.weight"] = weight
    write_gguf(tmp_path / "m.gguf", layers=2, tensors=tensors)
    checkpoint = load_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.config.tie_word_embeddings is tied
    for name, value in state.items():
        if name in checkpoint.weights.shapes:
            assert np.array_equal(checkpoint.weights.read(name).numpy(), value), name

    executor = TorchExecutor(checkpoint, dtype="float32", num_pages=32, threads=1)
    tokens = [3, 14, 15, 9, 26, 5]
    pages = list(range(1, 21))
    logits = executor.execute(make_record(make_row(tokens, pages)))
    while len(tokens) < 206:  # 200 greedy tokens, by decode steps of one token
        tokens.append(int(logits.argmax()))
        logits = executor.execute(make_record(make_row(tokens[-1:], pages, start=len(tokens) - 1)))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert (logits[0] - expected[-1]).abs().max() < 1e-4
    for position in range(5, 205):
        margin = expected[position].max() - expected[position, tokens[position + 1]]
        assert margin < 1e-4, position


def test_the_packaged_model_predicts_text(float32_executor, all_logits, texts) -> None:
    """Left permuted, the rows of this file give 4.9 and 3.4 nats a token instead of 2.9 and 0.5."""
    for tokens, first, most in ((texts[0], 100, 3.3), (texts[1], 0, 0.8)):
        log_probabilities = all_logits(float32_executor, tokens).log_softmax(dim=-1)
        chosen = log_probabilities[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert len(tokens) > first + 50
        assert -chosen[first:].mean() < most


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"blk.0.attn_v.weight": None}, "missing: model.layers.0.self_attn.v_proj.weight"),
        ({"output_norm.weight": None}, "missing: model.norm.weight"),
        ({"blk.0.attn_q.bias": np.zeros(HIDDEN)}, "unknown: model.layers.0.self_attn.q_proj.bias"),
        ({"blk.1.ffn_up.weight": np.zeros((INNER, HIDDEN))}, "unknown: model.layers.1.mlp.up_proj.weight"),
        (
            {"blk.0.ffn_up.weight": np.zeros((INNER, 128))},
            "wrong shape: model.layers.0.mlp.up_proj.weight is [256, 128], expected [256, 256]",
        ),
        ({"output.weight": np.zeros((VOCAB, 128))}, "wrong shape: lm_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_stop_the_load_by_name(tmp_path: Path, tensors: Any, expected: str) -> None:
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    assert expected in load_error(tmp_path / "m.gguf")


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tensors={"blk.0.attn_v.weight": None, "blk.0.ffn_up.weight": None})
    message = load_error(tmp_path / "m.gguf")
    assert "v_proj" in message and "up_proj" in message


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert "ends before the data of blk.0.ffn_down.weight" in load_error(path)
    for length in (0, 3, 10, 40, 500):
        path.write_bytes(whole[:length])
        load_error(path)


def test_what_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in load_error(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    assert "version 1" in load_error(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60) + bytes(100))
    assert "damaged" in load_error(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"architecture": "phi3"}, "architecture 'phi3' is not supported (supported: llama, qwen2"),
        ({"extra": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"extra": {"llama.rope.dimension_count": 32}}, "partial rotary"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
        ({"heads": 1}, "1 heads can not share 2"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, options: Any, expected: str) -> None:
    write_gguf(tmp_path / "m.gguf", **options)
    assert expected in load_error(tmp_path / "m.gguf")


def test_all_end_tokens_count(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(VOCAB)]
    tokens[40] = "<|im_end|>"
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 1,
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, extra=metadata)
    assert read_model_config(ResolvedSource("gguf", path)).eos_token_ids == (2, 7)
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|eot_id|>"
    write_gguf(path, extra=metadata | {"tokenizer.chat_template": template})
    config = read_model_config(ResolvedSource("gguf", path))
    assert config.eos_token_ids == (2, 7, 40) and config.bos_token_id == 1


def test_the_header_agrees_with_the_gguf_library(smollm) -> None:
    header = read_gguf_header(smollm.source.path)
    reader = gguf.GGUFReader(smollm.source.path)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.offset, info.ggml_type) == (tensor.data_offset, tensor.tensor_type)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, field in fields.items():
        if len(field.data) < 1000:
            assert header.metadata[name] == field.contents(), name
    merges = fields["tokenizer.ggml.merges"]
    assert header.metadata["tokenizer.ggml.merges"][-1] == merges.contents(len(merges.data) - 1)
