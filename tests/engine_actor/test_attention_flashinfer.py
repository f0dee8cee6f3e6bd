"""The FlashInfer adapter against a fake of the package that holds it to the contract."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_flashinfer import _PLAN_DECODE, _PLAN_PREFILL, FakeFlashInfer
from test_attention_reference import HEAD_DIM, HEADS, KV_HEADS, LAYERS, PAGES, Oracle, random_qkv

from engine_actor.attention import select
from engine_actor.attention.flashinfer import FlashInferBackend, PageTable
from engine_actor.attention.select import AttentionShape, AttentionUnavailable, probe, select_attention

CPU = torch.device("cpu")
SHAPE = AttentionShape(LAYERS, HEADS, KV_HEADS, HEAD_DIM)


@pytest.fixture
def fake() -> FakeFlashInfer:
    return FakeFlashInfer()


def make_backend(fake: FakeFlashInfer, heads: int = HEADS) -> FlashInferBackend:
    return FlashInferBackend(
        fake,
        num_layers=LAYERS,
        num_heads=heads,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_pages=PAGES,
        dtype=torch.bfloat16,
        device=CPU,
        make_event=fake.make_event,
    )


def test_mixed_steps_equal_attention_written_out(fake, make_record, make_row) -> None:
    tables = [[3, 50, 7], [9], [21, 2, 33, 14], [60, 5], list(range(40, 46))]
    steps = [
        [(0, 17), (1, 1), (2, 33), (3, 5)],
        [(0, 1), (1, 1), (2, 9), (3, 1), (4, 90)],
        [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],
        [(3, 16), (4, 2)],
        [(4, 1)],
    ]
    backend, oracle, done = make_backend(fake), Oracle(), [0] * len(tables)
    for number, step in enumerate(steps):
        record = make_record(*(make_row([0] * n, tables[r], start=done[r]) for r, n in step))
        q, k, v = random_qkv(record.num_tokens, number, torch.bfloat16)
        got = backend.forward(1, q, k, v, backend.prepare(record))
        expected = oracle.step([r for r, _ in step], record, q, k, v)
        assert got.dtype == torch.bfloat16 and got.shape == q.shape
        assert (got.float() - expected).abs().max() < 0.05, number
        for r, n in step:
            done[r] += n
    kinds = ["Prefill" in name for name in fake.plans]
    assert kinds == [True, True, False, True, False], "decode steps, and they alone, run the decode kernel"


def test_one_plan_serves_all_layers(fake, make_record, make_row) -> None:
    backend = make_backend(fake)
    record = make_record(make_row([0] * 5, [3]))
    metadata = backend.prepare(record)
    q, k, v = random_qkv(5, 0, torch.bfloat16)
    first = backend.forward(0, q, k, v, metadata)
    assert torch.equal(backend.forward(1, q, k, v, metadata), first)
    assert len(fake.plans) == 1


def test_the_fake_notices_a_plan_before_the_copy_has_ended(fake, make_record, make_row) -> None:
    backend = make_backend(fake)
    backend._decode._copied = None
    record = make_record(make_row([0], [3]))
    backend.prepare(record)
    backend._decode._copied = None  # nobody waits
    with pytest.raises(AssertionError, match="copy of the plan before"):
        backend.prepare(record)


def test_tensor_cores_serve_groups_that_the_plain_kernel_does_not(fake, make_record, make_row) -> None:
    backend = make_backend(fake, heads=7 * KV_HEADS)
    assert backend._decode.wrappers[-1].options["use_tensor_cores"]
    assert not make_backend(fake)._decode.wrappers[-1].options["use_tensor_cores"]  # group of 3
    metadata = backend.prepare(make_record(make_row([0], [3])))
    q = torch.ones(1, 7 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    k = torch.ones(1, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    assert torch.equal(backend.forward(0, q, k, k, metadata), q)


def test_padded_rows_read_one_token_of_the_dummy_page() -> None:
    table = PageTable(np.array([0, 2], np.int32), np.array([7, 9], np.int32), np.array([3], np.int32))
    padded = table.padded(3)
    assert padded.indptr.tolist() == [0, 2, 3, 4]
    assert padded.indices.tolist() == [7, 9, 0, 0]
    assert padded.last_page_len.tolist() == [3, 1, 1]
    assert all(a.dtype == np.int32 for a in (padded.indptr, padded.indices, padded.last_page_len))


def test_float32_is_refused(fake) -> None:
    with pytest.raises(ValueError, match=r"not in torch\.float32"):
        FlashInferBackend(
            fake, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, num_pages=2, dtype=torch.float32,
            device=CPU, make_event=fake.make_event,
        )  # fmt: skip


def test_probe_passes_a_good_package_and_finds_a_bad_one(fake, monkeypatch) -> None:
    probe(fake, SHAPE, dtype=torch.bfloat16, device=CPU, make_event=fake.make_event)
    assert ["Prefill" in name for name in fake.plans] == [True, True, False]
    run = fake.BatchDecodeWithPagedKVCacheWrapper.run
    monkeypatch.setattr(
        fake.BatchDecodeWithPagedKVCacheWrapper, "run", lambda self, q, cache: run(self, q, cache) + 0.1
    )
    with pytest.raises(AttentionUnavailable, match="not the reference's"):
        probe(fake, SHAPE, dtype=torch.bfloat16, device=CPU, make_event=fake.make_event)


def test_probe_turns_any_failure_into_a_reason(fake, monkeypatch) -> None:
    def no_compiler(self, **arguments) -> None:
        raise RuntimeError("Could not find nvcc and default cuda_home\nmore lines")

    monkeypatch.setattr(fake.BatchPrefillWithPagedKVCacheWrapper, "plan", no_compiler)
    with pytest.raises(AttentionUnavailable, match=r"RuntimeError.*nvcc"):
        probe(fake, SHAPE, dtype=torch.bfloat16, device=CPU, make_event=fake.make_event)


def test_who_insists_gets_the_reason_and_auto_the_reference(monkeypatch) -> None:
    options = {"num_pages": 4, "dtype": torch.bfloat16, "device": CPU}
    with pytest.raises(AttentionUnavailable, match="needs a CUDA device, not cpu"):
        select_attention("flashinfer", SHAPE, **options)
    backend, reason = select_attention("auto", SHAPE, **options)
    assert (backend.name, reason) == ("reference", None)  # nobody expects FlashInfer on a CPU

    class Cuda:
        type = "cuda"

    def fails(device) -> None:
        raise AttentionUnavailable("no module named flashinfer")

    monkeypatch.setattr(select, "import_flashinfer", fails)
    monkeypatch.setattr(select, "ReferenceBackend", lambda **shape: shape)
    backend, reason = select_attention("auto", SHAPE, num_pages=4, dtype=torch.bfloat16, device=Cuda())
    assert reason == "no module named flashinfer"


def test_each_window_has_a_plan_of_its_own(fake, make_record, make_row) -> None:
    """Layer 0 sees everything, layer 1 a window of four; both equal the reference, in prefill and in decode."""
    shape = replace(SHAPE, sliding_window=4, sliding_layers=(1,))
    backend = select._flashinfer(fake, shape, PAGES, torch.bfloat16, CPU, fake.make_event)
    exact = select._reference(shape, PAGES, torch.float32, CPU)
    for record in (
        make_record(make_row([0] * 20, [3, 5]), make_row([0] * 3, [7])),
        make_record(make_row([0], [3, 5], start=20), make_row([0], [7], start=3)),
    ):
        q, k, v = random_qkv(record.num_tokens, 1, torch.bfloat16)
        metadata, exact_metadata = backend.prepare(record), exact.prepare(record)
        outputs = []
        for layer in range(2):
            got = backend.forward(layer, q, k, v, metadata).float()
            expected = exact.forward(layer, q.float(), k.float(), v.float(), exact_metadata)
            assert (got - expected).abs().max() < 0.05
            outputs.append(got)
        assert not torch.equal(*outputs)
    probe(fake, shape, dtype=torch.bfloat16, device=CPU, make_event=fake.make_event)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_fake_has_the_signatures_of_the_real_package() -> None:
    import flashinfer

    for name, allowed in (
        ("BatchDecodeWithPagedKVCacheWrapper", _PLAN_DECODE),
        ("BatchPrefillWithPagedKVCacheWrapper", _PLAN_PREFILL),
    ):
        parameters = inspect.signature(getattr(flashinfer, name).plan).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            assert allowed <= set(parameters)
