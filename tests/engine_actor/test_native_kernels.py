"""The native kernels one by one against torch, and how they are built."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine_actor.attention.base import token_positions, token_slots
from engine_actor.native import build
from engine_actor.native.build import NativeUnavailable, best_instructions, load_library
from engine_actor.native.executor import StepArrays
from engine_actor.native.memory import Arena
from engine_actor.native.packing import (
    BF16,
    BYTES,
    INT4,
    INT4_BLOCK,
    INT8,
    NIBBLES,
    interleave,
    pack,
    quantise_int4,
    quantise_int8,
)
from engine_actor.native.weights import Activations, HeadNorms, Heads, Weight, weight_struct

STORE, ADD, SILU_MUL, GELU_MUL = range(4)
FACTORS = np.array([1.0, 0.1, 0.01, 0.001] * 64, dtype=np.float32)


@pytest.fixture(scope="module", params=build.INSTRUCTION_SETS, ids=lambda instructions: instructions.name)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    instructions = request.param
    try:
        if build.INSTRUCTION_SETS.index(instructions) < build.INSTRUCTION_SETS.index(best_instructions()):
            pytest.skip(f"this CPU has no {instructions.name}")
        return load_library(instructions)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Rows:
    """The rows of a product as the kernels take them, and as the numbers they stand for."""

    struct: Activations
    values: torch.Tensor
    kept: list[torch.Tensor]


def rows_of(library: ctypes.CDLL, x: torch.Tensor, form: int) -> Rows:
    """x [rows, k] bfloat16, quantised for int8 and int4 weights."""
    if form == BF16:
        return Rows(Activations(values=x.data_ptr()), x.float(), [x])
    group = {INT8: 64, INT4: 32}[form]
    quantised = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(len(x), x.shape[1] // group)
    sums = torch.empty(scales.shape, dtype=torch.int32)
    for i in range(len(x)):
        library.evenhand_quantise_row(
            *(x[i].data_ptr(), x.shape[1], form),
            *(quantised[i].data_ptr(), scales[i].data_ptr(), sums[i].data_ptr()),
        )
    values = (quantised.view(*scales.shape, group) * scales[..., None]).view(x.shape)
    struct = Activations(bytes=quantised.data_ptr(), scales=scales.data_ptr(), sums=sums.data_ptr())
    return Rows(struct, values, [quantised, scales, sums])


def pack_both(weight: torch.Tensor, form: int, arena: Arena) -> tuple[Weight, torch.Tensor]:
    """The packed weight, and the numbers that it stands for."""
    struct = weight_struct(pack(weight, form), arena)
    if form == BF16:
        return struct, weight.bfloat16().float()
    if form == INT8:
        values, scale = quantise_int8(weight)
        return struct, values * scale[:, None]
    nibbles, factor, minimum = quantise_int4(weight)
    blocks = nibbles.view(*factor.shape, INT4_BLOCK) * factor.float()[..., None] + minimum.float()[..., None]
    return struct, blocks.view(weight.shape)


def gemm(
    library: ctypes.CDLL,
    rows: Rows,
    weight: Weight,
    epilogue: int,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    library.evenhand_gemm(
        *(ctypes.byref(rows.struct), len(rows.values), ctypes.byref(weight), epilogue, out.data_ptr()),
        *(None if bias is None else bias.data_ptr(), 2),
    )


FORMATS = pytest.mark.parametrize("form", [BF16, INT8, INT4])


@FORMATS
@pytest.mark.parametrize("rows", [1, 3, 7, 9, 16, 100, 193])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (80, 128), (131, 192)])
def test_gemm_stores_with_bias_and_adds(library, rows: int, n: int, k: int, form: int) -> None:
    x, bias, arena = rows_of(library, random(rows, k).bfloat16(), form), random(n, seed=2), Arena()
    weight, values = pack_both(random(n, k, seed=1), form, arena)
    product = x.values @ values.T
    for epilogue, added in ((STORE, bias), (STORE, None), (ADD, None)):
        # One row more than is computed: nothing may be written past the end.
        out = torch.full((rows + 1, n), 3.0)
        gemm(library, x, weight, epilogue, out, added)
        expected = product + (3.0 if epilogue == ADD else 0.0 if added is None else added)
        assert torch.allclose(out[:rows], expected, atol=2e-4, rtol=2e-4)
        assert (out[rows] == 3.0).all()


@FORMATS
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_gemm_with_an_activation_of_the_gate_times_up(library, rows: int, form: int) -> None:
    x, arena = rows_of(library, random(rows, 64).bfloat16(), form), Arena()
    weight, values = pack_both(interleave(random(48, 64, seed=1), random(48, 64, seed=2)), form, arena)
    out = torch.empty(rows, 48, dtype=torch.bfloat16)
    gate, up = (x.values @ values.T).view(rows, 3, 2, 16).unbind(2)
    for epilogue, activated in ((SILU_MUL, F.silu(gate)), (GELU_MUL, F.gelu(gate, approximate="tanh"))):
        gemm(library, x, weight, epilogue, out)
        assert torch.allclose(out.float(), (activated * up).reshape(rows, 48), atol=2e-3, rtol=1 / 128)


@pytest.mark.parametrize("epilogue", [SILU_MUL, GELU_MUL])
@pytest.mark.parametrize(("gate", "activated"), [(1e14, 1e14), (-1e14, 0.0)])
def test_activations_of_large_values_are_their_limits(
    library, epilogue: int, gate: float, activated: float
) -> None:
    x, arena = torch.zeros(1, 64), Arena()
    x[0, :2] = torch.tensor([gate, 1.0])
    gates, ups = torch.zeros(2, 16, 64)
    gates[:, 0] = ups[:, 1] = 1.0
    weight, _ = pack_both(interleave(gates, ups), BF16, arena)
    out = torch.empty(1, 16, dtype=torch.bfloat16)
    gemm(library, rows_of(library, x.bfloat16(), BF16), weight, epilogue, out)
    assert torch.allclose(out.float(), torch.full((1, 16), activated), rtol=1 / 128, atol=1e-6)


@FORMATS
def test_a_row_of_a_product_is_the_same_to_the_bit_in_any_batch(library, form: int) -> None:
    x, arena = random(130, 64).bfloat16(), Arena()
    weight, _ = pack_both(random(96, 64, seed=1), form, arena)

    def product(first: int, rows: int) -> torch.Tensor:
        out = torch.empty(rows, 96)
        gemm(library, rows_of(library, x[first : first + rows], form), weight, STORE, out)
        return out

    whole = product(0, 130)
    for first, rows in ((0, 1), (5, 3), (60, 70), (129, 1)):
        assert torch.equal(product(first, rows), whole[first : first + rows])


def of_blocks(n: int, k: int, least: int, greatest: int, minimum: float) -> torch.Tensor:
    """Weights as files with blocks of 32 have them: a factor and whole numbers, here with both ends in each block."""
    whole = torch.randint(least, greatest + 1, (n, k // 32, 32), generator=torch.Generator().manual_seed(1))
    whole[..., 3], whole[..., 17] = least, greatest
    factor = random(n, k // 32, 1, seed=2).abs().mul(0.01).add(1e-3).half().float()
    offset = (random(n, k // 32, 1, seed=3) * minimum).half().float()
    return (whole * factor + offset).view(n, k)


BLOCKS = pytest.mark.parametrize(
    ("form", "weights"),
    [
        (NIBBLES, (0, 15, 0.1)),
        (NIBBLES, (-8, 7, 0.0)),
        (NIBBLES, (-7, 8, 0.0)),
        (NIBBLES, (0, 9, 0.1)),
        (BYTES, (-127, 127, 0.0)),
    ],
    ids=["Q4_1", "Q4_0", "Q4_0 upside down", "few levels", "Q8_0"],
)


@BLOCKS
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 40])
def test_a_product_out_of_blocks_is_that_of_the_bfloat16_weights_to_the_bit(
    library, rows: int, form: int, weights: tuple[int, int, float]
) -> None:
    arena, x = Arena(), random(rows, 192).bfloat16()
    packed = pack(of_blocks(100, 192, *weights), BF16)
    assert packed.blocks is not None and packed.blocks.format == form
    products = []
    for both in (packed, dataclasses.replace(packed, blocks=None)):
        out = torch.empty(rows, 100)
        gemm(library, rows_of(library, x, BF16), weight_struct(both, arena), STORE, out)
        products.append(out)
    assert torch.equal(*products)


@BLOCKS
def test_other_weights_have_no_blocks(form: int, weights: tuple[int, int, float]) -> None:
    exact = of_blocks(64, 64, *weights)
    assert pack(exact, BF16).blocks is not None
    for row in (0, 63):
        other = exact.clone()
        step = (other[row, 17] - other[row, 3]) / (weights[1] - weights[0])
        other[row, 5] = other[row, 3] + step * {NIBBLES: 4.5, BYTES: 87.5}[form]
        assert pack(other, BF16).blocks is None
    assert pack(torch.full((32, 64), torch.nan), BF16).blocks is None
    assert pack(torch.full((32, 64), 1e8), BF16).blocks is None
    assert pack(random(32, 48), BF16).blocks is None


def highest(library: ctypes.CDLL, x: torch.Tensor, weight: Weight) -> list[int]:
    rows = rows_of(library, x, BF16)
    best = torch.empty(2 * len(x) * 256 + 64, dtype=torch.uint8)
    found = np.empty(len(x), np.int32)
    start = best.data_ptr() + -best.data_ptr() % 64
    library.evenhand_highest(
        ctypes.byref(rows.struct), len(x), ctypes.byref(weight), start, found.ctypes.data, 2
    )
    return found.tolist()


@pytest.mark.parametrize("n", [32, 100, 1003])
def test_the_highest_column_is_the_first_one_and_never_padding(library, n: int) -> None:
    x, arena = random(21, 64).bfloat16(), Arena()
    weight, values = pack_both(random(n, 64, seed=1), BF16, arena)
    assert highest(library, x, weight) == (x.float() @ values.T).argmax(1).tolist()
    negative, _ = pack_both(
        -torch.ones(n, 64), BF16, arena
    )  # equal everywhere, and padding is 0, which is higher
    assert highest(library, torch.ones(3, 64).bfloat16(), negative) == [0, 0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_highest_column(library, bad: float) -> None:
    x, values, arena = torch.ones(2, 64).bfloat16(), torch.ones(70, 64), Arena()
    x[1, 5], values[66, 5] = 0, bad
    assert highest(library, x[:1], pack_both(values, BF16, arena)[0]) == [-1]
    x[0, 5] = bad
    assert highest(library, x, pack_both(torch.ones(70, 64), BF16, arena)[0]) == [-1, 0]


@pytest.mark.parametrize("form", [BF16, INT8])
def test_a_row_of_a_packed_weight_is_read_back(library, form: int) -> None:
    arena = Arena()
    weight, values = pack_both(random(70, 64), form, arena)
    for column in (0, 31, 32, 69):
        out = torch.empty(64)
        library.evenhand_read_row(ctypes.byref(weight), column, out.data_ptr())
        assert torch.equal(out, values[column])


def test_four_bits_keep_what_is_of_four_bits_already() -> None:
    levels = torch.randint(0, 16, (6, 4, 32), generator=torch.Generator().manual_seed(0))
    levels[..., 0], levels[..., 1] = 0, 15
    factor, minimum = random(6, 4, 1).abs().half().float(), random(6, 4, 1, seed=1).half().float()
    nibbles, found_factor, found_minimum = quantise_int4((levels * factor + minimum).view(6, 128))
    assert torch.equal(found_factor.float()[..., None], factor)
    assert torch.equal(found_minimum.float()[..., None], minimum)
    assert torch.equal(nibbles.view(6, 4, 32), levels.to(torch.uint8))
    # As in Q4_0: 16 levels around 0, of which the uppermost may be unused.
    symmetric = (levels.clamp(max=12) - 8) * factor
    nibbles, found_factor, found_minimum = quantise_int4(symmetric.view(6, 128))
    found = nibbles.view(6, 4, 32) * found_factor.float()[..., None] + found_minimum.float()[..., None]
    assert torch.allclose(found, symmetric, rtol=1e-3, atol=0)


def test_quantised_rows_are_within_half_a_step(library) -> None:
    x = random(3, 128).bfloat16()
    x[1] = 0
    for form, group in ((INT8, 64), (INT4, 32)):
        rows = rows_of(library, x, form)
        step = x.float().view(3, -1, group).abs().amax(-1, keepdim=True) / 127
        assert ((rows.values - x.float()).view(3, -1, group).abs() <= step * 0.5001).all()
        assert not rows.values[1].any()


def test_rms_norm(library) -> None:
    x, weight = random(80) * 3, random(80, seed=1)
    out = torch.empty(80, dtype=torch.bfloat16)
    library.evenhand_rms_norm_row(x.data_ptr(), weight.data_ptr(), 1e-5, 80, out.data_ptr())
    assert torch.allclose(out.float(), F.rms_norm(x, (80,), weight, 1e-5), atol=1e-6, rtol=1 / 200)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """q [n, heads, dim] of the last n tokens; k and v [context, kv_heads, dim]; window 0: all tokens are seen."""
    n, context, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,chd->hnc", q, k) / math.sqrt(q.shape[-1])
    position, key = torch.arange(context - n, context)[:, None], torch.arange(context)
    hidden = (key > position) | (key <= position - (window or context))
    return torch.einsum("hnc,chd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def test_a_norm_is_added_to_the_residual(library) -> None:
    x, weight, residual = random(80) * 3, random(80, seed=1), random(80, seed=2)
    out = residual.clone()
    library.evenhand_add_rms_norm_row(x.data_ptr(), weight.data_ptr(), 1e-5, 80, out.data_ptr())
    assert torch.allclose(out, residual + F.rms_norm(x, (80,), weight, 1e-5), atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [
        (9, 3, 64, 0),
        (1, 1, 16, 0),
        (4, 4, 32, 20),
        (8, 1, 80, 1),
        (14, 2, 128, 0),
        (2, 1, 256, 100),
    ],
)
def test_rope_store_and_attention(
    library, make_record, make_row, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    """Three requests in chunks over shuffled pages that are full of NaN before."""
    lengths, cuts = [150, 33, 5], [(70, 16, 4), (149, 17, 5), (150, 33, 5)]
    tables = [[7, 3, 12, 1, 9, 2, 15, 4, 16, 17], [11, 5, 8], [6]]
    pool = (18, kv_heads, dim * 16)
    keys, values = (torch.full(pool, torch.nan, dtype=torch.bfloat16) for _ in range(2))
    inputs = [random(n, heads + 2 * kv_heads, dim, seed=n) for n in lengths]
    frequencies = torch.from_numpy(FACTORS[: dim // 2])
    shape, starts = Heads(heads, kv_heads, dim), [0, 0, 0]
    # With a window, heads of q and k pass norms as well.
    q_norm, k_norm = random(dim, seed=1), random(dim, seed=2)
    norms = HeadNorms(q_norm.data_ptr(), k_norm.data_ptr(), 1e-5) if window else HeadNorms(None, None, 1e-5)
    for ends in cuts:
        rows = [i for i in range(3) if ends[i] > starts[i]]
        record = make_record(
            *(make_row([0] * (ends[i] - starts[i]), tables[i], start=starts[i]) for i in rows)
        )
        arrays = StepArrays(record)
        step, tokens = ctypes.byref(arrays.struct), record.num_tokens
        qkv = torch.cat([inputs[i][starts[i] : ends[i]] for i in rows]).contiguous()
        cos, sin = torch.empty(2, dim // 2)
        q, out = torch.empty(2, tokens, heads, dim, dtype=torch.bfloat16)
        tasks = torch.empty(2 * (tokens + 3), dtype=torch.int32)
        for t, (position, slot) in enumerate(zip(token_positions(record), token_slots(record), strict=True)):
            library.evenhand_rope_angles(
                int(position), frequencies.data_ptr(), dim // 2, cos.data_ptr(), sin.data_ptr()
            )
            library.evenhand_rope_store(
                *(
                    ctypes.byref(shape),
                    ctypes.byref(norms),
                    qkv[t].data_ptr(),
                    cos.data_ptr(),
                    sin.data_ptr(),
                    int(slot),
                ),
                *(q[t].data_ptr(), keys.data_ptr(), values.data_ptr()),
            )
        library.evenhand_attention(
            *(step, ctypes.byref(shape), window, dim**-0.5, q.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(tasks.data_ptr(), out.data_ptr(), 2),
        )
        done = 0
        for i in rows:
            angle = torch.arange(ends[i])[:, None, None] * frequencies
            heads_in = inputs[i][: ends[i], : heads + kv_heads]
            if window:
                normed = (
                    F.rms_norm(heads_in[:, :heads], (dim,), q_norm, 1e-5),
                    F.rms_norm(heads_in[:, heads:], (dim,), k_norm, 1e-5),
                )
                heads_in = torch.cat(normed, dim=1)
            first, second = heads_in.chunk(2, dim=-1)
            rotated = torch.cat(
                (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
            )
            rotated = rotated.bfloat16().float()
            v = inputs[i][: ends[i], heads + kv_heads :].bfloat16().float()
            expected = dense_attention(rotated[starts[i] :, :heads], rotated[:, heads:], v, window)
            count = ends[i] - starts[i]
            assert torch.allclose(out[done : done + count].float(), expected, atol=0.03, rtol=0.02)
            done += count
        starts = list(ends)


@pytest.mark.parametrize("step", [3.0, -3.0, 0.02])
@pytest.mark.parametrize("window", [0, 90])
def test_attention_to_scores_that_grow_or_fall(
    library, make_record, make_row, step: float, window: int
) -> None:
    """By 3 from key to key they leave the range of exp2 within a block, by 0.02 they grow less than one in a block."""
    context, new, heads, dim = 205, 21, 3, 32
    q = torch.zeros(new, heads, dim)
    q[..., 0] = dim**0.5
    k, v = torch.zeros(208, 1, dim), random(208, 1, dim).bfloat16().float()
    k[:, 0, 0] = (step * torch.arange(208)).bfloat16().float()
    keys = k.view(13, 16, dim // 2, 2).transpose(1, 2).bfloat16().contiguous()
    values = v.view(13, 8, 2, dim).transpose(2, 3).bfloat16().contiguous()
    record = make_record(make_row([0] * new, list(range(13)), start=context - new))
    arrays, shape, queries = StepArrays(record), Heads(heads, 1, dim), q.bfloat16()
    tasks, out = (
        torch.empty(2 * (new + 1), dtype=torch.int32),
        torch.empty(new, heads, dim, dtype=torch.bfloat16),
    )
    library.evenhand_attention(
        *(ctypes.byref(arrays.struct), ctypes.byref(shape), window, dim**-0.5, queries.data_ptr()),
        *(keys.data_ptr(), values.data_ptr(), tasks.data_ptr(), out.data_ptr(), 2),
    )
    expected = dense_attention(queries.float(), k[:context], v[:context], window)
    assert torch.allclose(out.float(), expected, atol=0.03, rtol=0.02)


def test_no_compiler_and_a_failing_one_are_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset(build.AVX2.cpu_flags))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        load_library()
    build.main()
    assert capsys.readouterr().out.startswith(
        "no native kernels, torch runs instead: there is no C++ compiler"
    )
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeUnavailable, match="failed"):
        load_library()
    assert [file.name for file in build.cache_directory().iterdir()] == ["lock"]


def test_the_best_instructions_of_the_cpu_are_taken() -> None:
    every = frozenset(build.AVX512.cpu_flags) | frozenset(build.AVX2.cpu_flags)
    assert best_instructions(every) is build.AVX512
    assert best_instructions(every - {"avx512_bf16"}) is build.AVX2
    with pytest.raises(NativeUnavailable, match="the CPU has no avx2"):
        best_instructions(every - {"avx512_bf16", "avx2"})
