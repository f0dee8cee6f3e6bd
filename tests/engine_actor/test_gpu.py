"""The CUDA path on a real device: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from engine_actor.attention.select import AttentionShape, import_flashinfer, probe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 8, 128), (32, 8, 128), (14, 2, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_real_kernels_pass_the_probe(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    probe(import_flashinfer(device), AttentionShape(1, heads, kv_heads, head_dim), dtype=dtype, device=device)


def test_replayed_decode_equals_eager_decode(smollm, make_record, make_row) -> None:
    from engine_actor.torch_executor import TorchExecutor

    replayed = TorchExecutor(smollm, num_pages=64, device="cuda", attention="flashinfer", graph_rows=8)
    eager = TorchExecutor(smollm, num_pages=64, device="cuda", attention="flashinfer")
    exact = TorchExecutor(smollm, num_pages=64, device="cuda", attention="reference", dtype="float32")
    tables, prompts = [[3, 5, 9], [7], [1, 2]], [20, 4, 17]
    records = [make_record(*(make_row([50] * n, t) for n, t in zip(prompts, tables, strict=True)))]
    for step in range(8):
        rows = zip(prompts, tables, strict=True)
        records.append(make_record(*(make_row([60 + step], t, start=n + step) for n, t in rows)))
    for record in records:
        got, other, expected = (one.execute(record).clone() for one in (replayed, eager, exact))
        assert torch.equal(got, other)
        kl = torch.nn.functional.kl_div(
            got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        assert kl < 0.01
    assert replayed.graphs is not None and replayed.graphs.replays == 8
