"""The reference backend against attention written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_actor.attention.base import token_positions, token_slots
from engine_actor.attention.reference import ReferenceBackend
from engine_actor.executor import PAGE_SIZE
from engine_actor.step import StepRecord

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGES = 2, 6, 2, 8, 64


def make_backend(dtype: torch.dtype = torch.float32) -> ReferenceBackend:
    return ReferenceBackend(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_pages=PAGES,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def random_qkv(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, n, HEAD_DIM, generator=generator).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS)
    ]


class Oracle:
    """Keeps K and V by request, without pages, and attends one token and one head at a time."""

    def __init__(self) -> None:
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.values: dict[int, list[torch.Tensor]] = {}

    def step(self, requests: list[int], record: StepRecord, q, k, v) -> torch.Tensor:
        out = torch.empty(q.shape)
        for row, request in enumerate(requests):
            keys, values = self.keys.setdefault(request, []), self.values.setdefault(request, [])
            for token in range(record.token_indptr[row], record.token_indptr[row + 1]):
                keys.append(k[token].float())
                values.append(v[token].float())
                for head in range(HEADS):
                    shared = head // (HEADS // KV_HEADS)
                    scores = torch.stack([key[shared] for key in keys]) @ q[token, head].float()
                    weights = torch.softmax(scores / HEAD_DIM**0.5, dim=0)
                    out[token, head] = weights @ torch.stack([value[shared] for value in values])
        return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_mixed_steps_equal_attention_written_out(make_record, make_row, dtype, tolerance) -> None:
    """Whole prompts, later chunks and decode rows of very different context, in one step and over steps."""
    tables = [[3, 50, 7], [9], [21, 2, 33, 14], [60, 5], list(range(40, 46))]
    steps = [
        [(0, 17), (1, 1), (2, 33), (3, 5)],
        [(0, 1), (1, 1), (2, 9), (3, 1), (4, 90)],
        [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],
        [(3, 16), (4, 2)],
        [(4, 1)],
    ]
    backend, oracle, done = make_backend(dtype), Oracle(), [0] * len(tables)
    for number, step in enumerate(steps):
        record = make_record(*(make_row([0] * n, tables[r], start=done[r]) for r, n in step))
        q, k, v = random_qkv(record.num_tokens, number, dtype)
        got = backend.forward(1, q, k, v, backend.prepare(record))
        expected = oracle.step([r for r, _ in step], record, q, k, v)
        assert got.dtype == dtype and got.shape == q.shape
        assert (got.float() - expected).abs().max() < tolerance, number
        for r, n in step:
            done[r] += n


def test_many_decode_rows_of_any_context(make_record, make_row) -> None:
    """More padding than one group may hold, so rows are split into groups and put back in order."""
    backend, oracle = make_backend(), Oracle()
    lengths = [1, 300, 15, 16, 17, 2, 250, 31]
    tables, free = [], iter(range(1, PAGES))
    for length in lengths:
        tables.append([next(free) for _ in range(length // PAGE_SIZE + 1)])
    record = make_record(*(make_row([0] * n, table) for n, table in zip(lengths, tables, strict=True)))
    q, k, v = random_qkv(record.num_tokens, 0)
    backend.forward(0, q, k, v, backend.prepare(record))
    oracle.step(list(range(8)), record, q, k, v)
    record = make_record(*(make_row([0], t, start=n) for n, t in zip(lengths, tables, strict=True)))
    metadata = backend.prepare(record)
    assert len(metadata.groups) > 1
    q, k, v = random_qkv(8, 1)
    got = backend.forward(0, q, k, v, metadata)
    assert (got - oracle.step(list(range(8)), record, q, k, v)).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, 5, 16, 31])
@pytest.mark.parametrize("rest", [float("nan"), float("inf")])
def test_nothing_of_a_former_owner_reaches_the_result(
    make_record, make_row, length: int, rest: float
) -> None:
    """Every other slot of the pool, the free slots of the own last page included, holds NaN or infinity."""
    q, k, v = random_qkv(length + 1, 3)
    rows = [make_row([0] * length, [4, 8]), make_row([0], [11])]
    record = make_record(*rows)
    clean, dirty = make_backend(), make_backend()
    dirty._keys.fill_(rest)
    dirty._values.fill_(rest)
    expected = clean.forward(0, q, k, v, clean.prepare(record))
    assert torch.equal(dirty.forward(0, q, k, v, dirty.prepare(record)), expected)
    decode = make_record(make_row([0], [4, 8], start=length))
    expected = clean.forward(0, q[:1], k[:1], v[:1], clean.prepare(decode))
    assert torch.equal(dirty.forward(0, q[:1], k[:1], v[:1], dirty.prepare(decode)), expected)


def test_a_step_writes_its_own_slots_and_no_other(make_record, make_row) -> None:
    backend = make_backend()
    record = make_record(make_row([0] * 3, [4, 8], start=15), make_row([0], [2]))
    q, k, v = random_qkv(4, 5)
    backend.forward(0, q, k, v, backend.prepare(record))
    slots = [4 * PAGE_SIZE + 15, 8 * PAGE_SIZE, 8 * PAGE_SIZE + 1, 2 * PAGE_SIZE]
    for pool, new in ((backend._keys, k), (backend._values, v)):
        assert torch.equal(pool[0][:, slots], new.transpose(0, 1))
        untouched = pool.clone()
        untouched[0][:, slots] = 0
        assert not untouched.any()


def test_prefix_pages_may_be_shared(make_record, make_row) -> None:
    """Two requests continue after the same cached page: both see it, neither sees the other."""
    backend, first, second = make_backend(), Oracle(), Oracle()
    prefix = make_record(make_row([0] * 16, [7], more=True))
    q, k, v = random_qkv(16, 6)
    backend.forward(0, q, k, v, backend.prepare(prefix))
    for oracle in (first, second):
        oracle.step([0], prefix, q, k, v)
    record = make_record(make_row([0] * 4, [7, 9], start=16), make_row([0] * 2, [7, 3], start=16))
    q, k, v = random_qkv(6, 7)
    got = backend.forward(0, q, k, v, backend.prepare(record))
    one = make_record(make_row([0] * 4, [7, 9], start=16))
    two = make_record(make_row([0] * 2, [7, 3], start=16))
    assert (got[:4] - first.step([0], one, q[:4], k[:4], v[:4])).abs().max() < 1e-5
    assert (got[4:] - second.step([0], two, q[4:], k[4:], v[4:])).abs().max() < 1e-5


def test_positions_and_slots_of_a_record(make_record, make_row) -> None:
    record = make_record(make_row([1, 2, 3], [5, 6], start=15), make_row([4], [9], start=2))
    assert token_positions(record).tolist() == [15, 16, 17, 2]
    assert token_slots(record).tolist() == [5 * 16 + 15, 6 * 16, 6 * 16 + 1, 9 * 16 + 2]
    assert token_slots(record).dtype == np.int64
