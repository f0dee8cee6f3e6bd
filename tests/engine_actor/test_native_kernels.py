"""The native kernels one by one against torch, and how they are built."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine_actor.native import build
from engine_actor.native.build import NativeUnavailable, load_library
from engine_actor.native.executor import StepArrays
from engine_actor.native.weights import Heads, interleave, pack

STORE, ADD, SILU_MUL = range(3)
FACTORS = np.array([1.0, 0.1, 0.01, 0.001] * 64, dtype=np.float32)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        return load_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 7, 9, 16, 100, 193])
@pytest.mark.parametrize(("n", "k"), [(32, 16), (80, 64), (131, 48)])
def test_gemm_stores_with_bias_and_adds(library, rows: int, n: int, k: int, threads: int) -> None:
    a, weight, bias = random(rows, k).bfloat16(), random(n, k, seed=1).bfloat16(), random(n, seed=2)
    packed, product = pack(weight), a.float() @ weight.float().T
    for epilogue, added in ((STORE, bias), (STORE, None), (ADD, None)):
        # One row more than is computed: nothing may be written past the end.
        out = torch.full((rows + 1, n), 3.0)
        library.evenhand_gemm(
            *(a.data_ptr(), rows, packed.data_ptr(), n, k, None if added is None else added.data_ptr()),
            *(epilogue, out.data_ptr(), threads),
        )
        expected = product + (3.0 if epilogue == ADD else 0.0 if added is None else added)
        assert torch.allclose(out[:rows], expected, atol=1e-4, rtol=1e-4)
        assert (out[rows] == 3.0).all()


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_gemm_with_silu_of_the_gate_times_up(library, rows: int) -> None:
    a, gate, up = random(rows, 64).bfloat16(), random(48, 64, seed=1), random(48, 64, seed=2)
    packed = pack(interleave(gate.bfloat16(), up.bfloat16()))
    out = torch.empty(rows, 48, dtype=torch.bfloat16)
    library.evenhand_gemm(a.data_ptr(), rows, packed.data_ptr(), 96, 64, None, SILU_MUL, out.data_ptr(), 1)
    x = a.float()
    expected = F.silu(x @ gate.bfloat16().float().T) * (x @ up.bfloat16().float().T)
    assert torch.allclose(out.float(), expected, atol=1e-3, rtol=1 / 128)


def test_a_row_of_a_product_is_the_same_to_the_bit_in_any_batch(library) -> None:
    a, packed = random(130, 64).bfloat16(), pack(random(96, 64, seed=1))

    def product(first: int, rows: int) -> torch.Tensor:
        out = torch.empty(rows, 96)
        library.evenhand_gemm(
            a[first:].data_ptr(), rows, packed.data_ptr(), 96, 64, None, STORE, out.data_ptr(), 2
        )
        return out

    whole = product(0, 130)
    for first, rows in ((0, 1), (5, 3), (60, 70), (129, 1)):
        assert torch.equal(product(first, rows), whole[first : first + rows])


def test_rms_norm_takes_the_rows_it_is_told(library) -> None:
    x, weight = random(9, 80) * 3, random(80, seed=1)
    pick = np.array([8, 2, 2], dtype=np.int32)
    for chosen, pointer in ((list(range(9)), None), (pick.tolist(), pick.ctypes.data)):
        out = torch.empty(len(chosen), 80, dtype=torch.bfloat16)
        library.evenhand_rms_norm(
            x.data_ptr(), pointer, weight.data_ptr(), 1e-5, len(chosen), 80, out.data_ptr(), 2
        )
        expected = F.rms_norm(x[chosen], (80,), weight, 1e-5)
        assert torch.allclose(out.float(), expected, atol=1e-6, rtol=1 / 200)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [n, heads, dim] of the last n tokens; k and v [context, kv_heads, dim]."""
    n, context, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,chd->hnc", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.arange(context) > torch.arange(context - n, context)[:, None]
    return torch.einsum("hnc,chd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (1, 1, 16), (4, 4, 32), (8, 1, 80), (14, 2, 128), (2, 1, 256)]
)
def test_rope_store_and_attention(
    library, make_record, make_row, heads: int, kv_heads: int, dim: int
) -> None:
    """Three requests in chunks over shuffled pages that are full of NaN before."""
    lengths, cuts = [150, 33, 5], [(70, 16, 4), (149, 17, 5), (150, 33, 5)]
    tables = [[7, 3, 12, 1, 9, 2, 15, 4, 16, 17], [11, 5, 8], [6]]
    pool = (18, kv_heads, dim * 16)
    keys, values = (torch.full(pool, torch.nan, dtype=torch.bfloat16) for _ in range(2))
    inputs = [random(n, heads + 2 * kv_heads, dim, seed=n) for n in lengths]
    frequencies = torch.from_numpy(FACTORS[: dim // 2])
    shape, starts = Heads(heads, kv_heads, dim), [0, 0, 0]
    for ends in cuts:
        rows = [i for i in range(3) if ends[i] > starts[i]]
        record = make_record(
            *(make_row([0] * (ends[i] - starts[i]), tables[i], start=starts[i]) for i in rows)
        )
        arrays = StepArrays(record)
        step, tokens = ctypes.byref(arrays.struct), record.num_tokens
        qkv = torch.cat([inputs[i][starts[i] : ends[i]] for i in rows]).contiguous()
        cos, sin = torch.empty(2, tokens, dim // 2)
        q, out = torch.empty(2, tokens, heads, dim, dtype=torch.bfloat16)
        tasks = torch.empty(2 * (tokens + 3), dtype=torch.int32)
        library.evenhand_rope_angles(
            step, frequencies.data_ptr(), dim // 2, cos.data_ptr(), sin.data_ptr(), 1
        )
        library.evenhand_rope_store(
            *(step, ctypes.byref(shape), qkv.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), 2),
        )
        library.evenhand_attention(
            *(step, ctypes.byref(shape), q.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(tasks.data_ptr(), out.data_ptr(), 2),
        )
        done = 0
        for i in rows:
            angle = torch.arange(ends[i])[:, None, None] * frequencies
            first, second = inputs[i][: ends[i], : heads + kv_heads].chunk(2, dim=-1)
            rotated = torch.cat(
                (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
            )
            rotated = rotated.bfloat16().float()
            v = inputs[i][: ends[i], heads + kv_heads :].bfloat16().float()
            expected = dense_attention(rotated[starts[i] :, :heads], rotated[:, heads:], v)
            count = ends[i] - starts[i]
            assert torch.allclose(out[done : done + count].float(), expected, atol=0.03, rtol=0.02)
            done += count
        starts = list(ends)


def test_no_compiler_and_a_failing_one_are_reasons(
    library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        load_library()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeUnavailable, match="failed"):
        load_library()
    assert [file.name for file in build.cache_directory().iterdir()] == ["lock"]


def test_a_cpu_without_the_instructions_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset(build.CPU_FLAGS) - {"avx512_bf16"}
    monkeypatch.setattr(build, "_cpu_flags", lambda: flags)
    with pytest.raises(NativeUnavailable, match="the CPU has no avx512_bf16"):
        load_library()
