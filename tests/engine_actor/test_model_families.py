"""Every family and kind of rope on small random weights: transformers' tokens, from safetensors and from GGUF."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from engine_actor.executor import PAGE_SIZE
from engine_actor.loading.checkpoint import load_checkpoint
from engine_actor.native.build import NativeUnavailable
from engine_actor.torch_executor import TorchExecutor

VOCAB = 160
NEAR_TIE = 1e-4
LENGTHS = (75, 3, 21, 40)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "Llama"},
    "llama-rope-llama3": {"family": "Llama", "rope_parameters": LLAMA3},
    "llama-rope-linear": {
        "family": "Llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "mistral-window": {"family": "Mistral", "sliding_window": 24},
    "qwen2": {"family": "Qwen2", "tie_word_embeddings": True},
    "qwen2-rope-yarn": {"family": "Qwen2", "rope_parameters": YARN},
    "qwen2-window": {
        "family": "Qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {"family": "Qwen3", "head_dim": 32},
    "gemma3": {
        "family": "Gemma3",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 32,
    },
    "gemma3-rope-linear-softcap": {
        "family": "Gemma3",
        "head_dim": 16,
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": GEMMA_ROPE,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": False,
    },
}


def save_model(directory: Path, *, family: str, **options: Any) -> Any:
    """A random model in a directory, as transformers saves it; returns the model. Norms and biases are random too."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": family == "Gemma3",
    }
    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(**(settings | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * (0.3 if name.endswith("bias") else 0.1)
    model.save_pretrained(directory)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def greedy(
    executor: TorchExecutor, make_record: Any, make_row: Any, steps: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Prompts and `steps` greedy tokens, all side by side, the longest prompt in two chunks; the last logits."""
    sequences = prompts()
    each = (max(LENGTHS) + steps) // PAGE_SIZE + 1
    tables = [list(range(1 + each * i, 1 + each * (i + 1))) for i in range(len(sequences))]
    executor.execute(make_record(make_row(sequences[0][:33], tables[0], more=True)))
    starts = [33, 0, 0, 0]
    for _ in range(steps):
        rows = [
            make_row(tokens[start:], table, start=start)
            for tokens, table, start in zip(sequences, tables, starts, strict=True)
        ]
        starts = [len(tokens) for tokens in sequences]
        logits = executor.execute(make_record(*rows))
        for tokens, token in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
            tokens.append(token)
    return sequences, logits


def assert_greedy(model: Any, sequences: list[list[int]], last: torch.Tensor) -> None:
    """Each generated token is the model's own choice, near ties aside, and the last logits are the model's."""
    for tokens, length, logits in zip(sequences, LENGTHS, last, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0]
        assert (expected[-2] - logits).abs().max() < 1e-3
        for position in range(length, len(tokens)):
            row = expected[position - 1]
            assert row.max() - row[tokens[position]] < NEAR_TIE, position


@pytest.mark.parametrize("case", CASES)
def test_64_greedy_tokens_equal_transformers(tmp_path: Path, make_record, make_row, case: str) -> None:
    model = save_model(tmp_path, **CASES[case])
    executor = TorchExecutor(load_checkpoint(str(tmp_path)), dtype="float32", num_pages=64, threads=1)
    assert_greedy(model, *greedy(executor, make_record, make_row, 64))


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma3"])
def test_bfloat16_is_no_further_from_float32_than_transformers_own(
    tmp_path: Path, all_logits: Callable[..., torch.Tensor], case: str
) -> None:
    model = save_model(tmp_path, **CASES[case])
    executor = TorchExecutor(load_checkpoint(str(tmp_path)), dtype="bfloat16", num_pages=64, threads=1)
    text = [token for tokens in prompts() for token in tokens]
    with torch.inference_mode():
        exact = log_softmax(model(torch.tensor([text])).logits[0], dim=-1)
        theirs = copy.deepcopy(model).bfloat16()(torch.tensor([text])).logits[0].float()

    def divergence(logits: torch.Tensor) -> float:
        return float(
            kl_div(log_softmax(logits, dim=-1), exact, log_target=True, reduction="none").sum(-1).mean()
        )

    ours = divergence(all_logits(executor, text))
    assert 0 < ours <= divergence(theirs)


def test_j06_float16_is_refused_where_activations_overflow(tmp_path: Path) -> None:
    save_model(tmp_path, **CASES["gemma3"])
    with pytest.raises(ValueError, match="float16 overflows in Gemma3ForCausalLM"):
        TorchExecutor(load_checkpoint(str(tmp_path)), dtype="float16", num_pages=4)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_gives_the_tokens_of_safetensors(tmp_path: Path, make_record, make_row, case: str) -> None:
    model = save_model(tmp_path, **CASES[case])
    write_gguf(tmp_path / "model.gguf", case, model)
    executors = [
        TorchExecutor(load_checkpoint(str(source)), dtype="float32", num_pages=64, threads=1)
        for source in (tmp_path, tmp_path / "model.gguf")
    ]
    (first, _), (second, logits) = (greedy(executor, make_record, make_row, 20) for executor in executors)
    assert first == second
    assert_greedy(model, second, logits)


@pytest.mark.parametrize("case", CASES)
def test_the_native_executor_computes_a_model_exactly_or_refuses_it(
    tmp_path: Path, make_record, make_row, case: str
) -> None:
    from engine_actor.native.executor import NativeExecutor

    save_model(tmp_path, **CASES[case])
    checkpoint = load_checkpoint(str(tmp_path))
    try:
        native = NativeExecutor(checkpoint, num_pages=64, threads=1)
    except NativeUnavailable as error:
        assert str(error)
        return
    exact = TorchExecutor(checkpoint, dtype="float32", num_pages=64, threads=1)
    record = make_record(
        *(make_row(tokens, range(1 + 8 * i, 9 + 8 * i)) for i, tokens in enumerate(prompts()))
    )
    expected = exact.execute(record)
    assert (native.execute(record) - expected).norm() < 0.05 * expected.norm()


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, architecture: str, model: Any) -> None:
    """The model as the usual converter writes it: q and k rows of llama in pairs, norms of gemma3 with the 1 added."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, True, False])
        assert config.query_pre_attn_scalar == head_dim  # the format has no field for another one
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = GEMMA_NAMES if architecture == "gemma3" else GGUF_NAMES
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        block = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            block = f"blk.{index}."
        if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = len(tensor) // head_dim
            tensor = tensor.view(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        if architecture == "gemma3" and tensor.ndim == 1:
            tensor = tensor + 1.0
        writer.add_tensor(f"{block}{names[stem]}.{kind}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
