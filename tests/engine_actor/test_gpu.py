"""The CUDA path on a real device: `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
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


def test_steps_begun_ahead_sample_what_steps_in_turn_do(smollm, make_record, make_row) -> None:
    """Prompts, then decode steps each begun before the one before has ended; half of the rows are drawn."""
    from dataclasses import replace

    from engine_actor.async_runner import AsyncModelRunner
    from engine_actor.torch_executor import TorchExecutor

    tables, prompts, steps = [[3, 5, 9], [7], [1, 2]], [20, 4, 17], 12
    records = [make_record(*(make_row([50] * n, t) for n, t in zip(prompts, tables, strict=True)))]
    for step in range(steps):
        rows = zip(prompts, tables, strict=True)
        records.append(make_record(*(make_row([-1 - i], t, start=n + step) for i, (n, t) in enumerate(rows))))
    temperature = np.array([0.0, 0.8, 0.8], np.float32)
    top_p = np.array([1.0, 0.9, 1.0], np.float32)
    records = [
        replace(r, sampling=replace(r.sampling, temperature=temperature, top_p=top_p)) for r in records
    ]
    answers = []
    for ahead in (1, 0):
        executor = TorchExecutor(smollm, num_pages=64, device="cuda", attention="flashinfer", graph_rows=8)
        runner = AsyncModelRunner(executor)
        waits, results = [], []
        for record in records:
            waits.append(runner.start(record))
            if len(waits) > ahead:
                results.append(waits.pop(0)())
        answers.append([r.token_ids.tolist() for r in results + [wait() for wait in waits]])
    assert answers[0] == answers[1] and len(answers[0]) == steps + 1


def test_the_sampler_draws_on_the_device_what_it_draws_on_the_cpu() -> None:
    from engine_actor.sampling.logprobs import token_logprobs
    from engine_actor.sampling.sampler import sample
    from engine_actor.step import BiasColumns, PenaltyColumns, SamplingColumns

    random, rows, vocab = np.random.default_rng(0), 64, 5000
    logits = torch.from_numpy(random.normal(0, 3, (rows, vocab)).astype(np.float32))
    every = np.arange(rows, dtype=np.int32)
    columns = SamplingColumns(
        temperature=random.choice([0.0, 0.7, 1.5], rows).astype(np.float32),
        top_k=random.choice([0, 5, 40], rows).astype(np.int32),
        top_p=random.choice([1.0, 0.9], rows).astype(np.float32),
        seed=random.integers(0, 2**63, rows).astype(np.uint64),
        position=every,
        min_p=random.choice([0.0, 0.1], rows).astype(np.float32),
        bias=BiasColumns(every, every * 7, np.full(rows, 2.0, np.float32)),
        penalties=PenaltyColumns(
            every, *np.full((3, rows), 1.2, np.float32), np.arange(rows + 1, dtype=np.int32), every, every
        ),
    )
    on_device = logits.cuda()
    tokens, finite = sample(logits, columns)
    device_tokens, device_finite = sample(on_device, columns)
    torch.testing.assert_close(on_device.cpu(), logits, rtol=1e-5, atol=1e-5)
    assert finite.all() and device_finite.all()
    assert (tokens == device_tokens).mean() > 0.95  # rounding decides some
    ours, theirs = token_logprobs(logits, tokens, 5), token_logprobs(on_device, tokens, 5)
    np.testing.assert_allclose(ours.logprob, theirs.logprob, atol=1e-4)
    np.testing.assert_allclose(ours.top_logprob, theirs.top_logprob, atol=1e-4)
