"""The sampler: exact choices where there is one, the right frequencies where there are many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.sampling.device import draw_rows
from engine_actor.sampling.host import draw, lower_bound
from engine_actor.sampling.random import uniform
from engine_actor.sampling.sampler import _on_gpu, sample
from engine_actor.step import SamplingColumns


def columns(rows: int, **values: Any) -> SamplingColumns:
    """Columns for `rows` rows; a value is one number for all rows or a list."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1, "position": range(rows)}
    types = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "seed": np.uint64,
        "position": np.int32,
    }
    filled = {
        name: np.broadcast_to(np.array(values.get(name, default), dtype=types[name]), rows).copy()
        for name, default in defaults.items()
    }
    return SamplingColumns(**filled)


def draws(logits: list[float], count: int = 8000, **values: Any) -> np.ndarray:
    """Relative frequency of each token over many positions of one seed."""
    rows = torch.tensor(logits).repeat(count, 1)
    tokens, finite = sample(rows, columns(count, **values))
    assert finite.all()
    return np.bincount(tokens, minlength=len(logits)) / count


LOGITS = [0.0, 2.0, -1.0, 1.0, 0.5]
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum()


def test_frequencies_follow_the_softmax() -> None:
    for seed in (0, 1, 2**64 - 1):
        np.testing.assert_allclose(draws(LOGITS, seed=seed), PROBABILITIES, atol=0.015)


def test_frequencies_over_seeds_at_one_position_follow_the_softmax() -> None:
    np.testing.assert_allclose(draws(LOGITS, seed=range(8000), position=7), PROBABILITIES, atol=0.015)


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 3.0):
        expected = PROBABILITIES ** (1 / temperature)
        np.testing.assert_allclose(
            draws(LOGITS, temperature=temperature), expected / expected.sum(), atol=0.015
        )


def test_temperature_zero_and_near_zero_take_the_maximum() -> None:
    for temperature in (0.0, 1e-8, 1e-45):
        assert draws([1.0, 3.0, 2.999, -5.0], count=50, temperature=temperature)[1] == 1.0
    tokens, _ = sample(torch.tensor([[1e30, -1e30, 3e30]]), columns(1, temperature=1e-20))
    assert tokens.tolist() == [2]


def test_top_k_keeps_the_k_likeliest() -> None:
    expected = np.array([0, np.exp(2), 0, np.exp(1), 0])
    np.testing.assert_allclose(draws(LOGITS, top_k=2), expected / expected.sum(), atol=0.015)
    assert draws(LOGITS, top_k=1, count=100)[1] == 1.0
    np.testing.assert_allclose(draws(LOGITS, top_k=99), PROBABILITIES, atol=0.015)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    # Probabilities in order: 0.56, 0.21, 0.13, 0.08, 0.03.
    for top_p, kept in ((0.0, 1), (0.5, 1), (0.6, 2), (0.8, 3), (0.91, 4), (0.999, 5)):
        expected = np.where(np.argsort(np.argsort(-np.array(LOGITS))) < kept, PROBABILITIES, 0)
        np.testing.assert_allclose(draws(LOGITS, top_p=top_p), expected / expected.sum(), atol=0.015)


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the two likeliest the first has 0.73: alone it reaches 0.7, though of all it has 0.56.
    assert draws(LOGITS, top_k=2, top_p=0.7, count=200)[1] == 1.0


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_a_nucleus_wider_than_the_first_candidates(top_p: float) -> None:
    """20,000 tokens of nearly equal probability: the nucleus ends far behind the first candidates."""
    logits = torch.linspace(0, 0.1, 20000).repeat(300, 1)
    tokens, _ = sample(logits, columns(300, top_p=top_p))
    mass = torch.softmax(logits[0].double(), dim=0).flip(0).cumsum(0)
    least = 20000 - 1 - int((mass < top_p).sum())
    assert least <= tokens.min() < least + 0.05 * (20000 - least)
    assert len(set(tokens.tolist())) > 250


def test_ties_at_the_border_are_kept() -> None:
    frequencies = draws([1.0, 1.0, 1.0, 0.0], top_k=2)
    np.testing.assert_allclose(frequencies, [1 / 3, 1 / 3, 1 / 3, 0], atol=0.015)


def test_excluded_tokens_are_never_drawn() -> None:
    """Tokens of probability zero at both ends, and in between, even for the extreme random numbers."""
    logits = torch.full((4000, 50), -200.0)
    logits[:, [10, 30]] = 0.0
    tokens, _ = sample(logits, columns(4000, seed=range(4000)))
    assert set(tokens.tolist()) == {10, 30}


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 100, generator=generator)
    values = columns(
        6, temperature=[0, 1, 0, 1, 0.7, 1], top_p=[1, 0.9, 1, 0.9, 1, 1], top_k=[0, 0, 0, 0, 5, 0]
    )
    expected, finite = sample(logits, values)
    assert finite.all()
    broken = logits.clone()
    broken[0, 3], broken[1, 50], broken[2, 99] = float("nan"), float("inf"), float("-inf")
    tokens, finite = sample(broken, values)
    assert finite.tolist() == [False, False, False, True, True, True]
    assert tokens[3:].tolist() == expected[3:].tolist() and tokens[:3].tolist() == [0, 0, 0]


def test_the_path_of_the_gpu_chooses_the_same() -> None:
    random = np.random.default_rng(0)
    count, vocab = 200, 500
    logits = torch.from_numpy(random.normal(0, 3, (count, vocab)).astype(np.float32))
    logits[3, 7], logits[4, 7], logits[5, 7] = float("nan"), float("inf"), float("-inf")
    values = columns(
        count,
        temperature=random.choice([0.0, 0.7, 2.0], count),
        top_k=random.choice([0, 1, 40], count),
        top_p=random.choice([1.0, 0.95, 0.3, 0.0], count),
        seed=random.integers(0, 2**63, count),
    )
    tokens, finite = sample(logits, values)
    gpu_tokens, gpu_finite = _on_gpu(logits.clone(), values)
    assert gpu_tokens.dtype == torch.int32 and gpu_finite.tolist() == finite.tolist()
    differ = np.flatnonzero(gpu_tokens.numpy() != tokens)
    assert len(differ) <= 1, "where rounding decides which side of a border a random number falls"
    assert not finite[3:6].any() and gpu_tokens[3:6].tolist() == [0, 0, 0]
    assert [len(part) for part in _on_gpu(torch.empty(0, vocab), columns(0))] == [0, 0]


def test_no_rows() -> None:
    tokens, finite = sample(torch.empty(0, 100), columns(0))
    assert tokens.shape == finite.shape == (0,)
    assert (tokens.dtype, finite.dtype) == (np.int32, np.bool_)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_token_does_not_depend_on_the_rest_of_the_batch(data: st.DataObject) -> None:
    """Each row alone, and all rows in any order, give the same tokens; the logits are not changed."""
    count = data.draw(st.integers(1, 8))
    seed = data.draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, 3, (count, 3000)).astype(np.float32))
    values = columns(
        count,
        temperature=random.choice([0.0, 0.3, 1.0, 5.0], count),
        top_k=random.choice([0, 1, 5, 2000], count),
        top_p=random.choice([1.0, 0.999, 0.9, 0.1], count),
        seed=random.integers(0, 2**63, count),
        position=random.integers(0, 8192, count),
    )
    before = logits.clone()
    together, _ = sample(logits, values)
    assert torch.equal(logits, before)
    order = random.permutation(count)
    shuffled, _ = sample(logits[torch.from_numpy(order)], subset(values, order))
    assert shuffled.tolist() == together[order].tolist()
    for row in range(count):
        alone, _ = sample(logits[row : row + 1], subset(values, np.array([row])))
        assert alone[0] == together[row]


def subset(values: SamplingColumns, rows: np.ndarray) -> SamplingColumns:
    return SamplingColumns(
        **{name: column[rows] for name, column in vars(values).items() if column is not None}
    )


def test_random_numbers_are_uniform_and_unrelated() -> None:
    count = 50000
    positions = np.arange(count, dtype=np.int32)
    for seed in (0, 1, 2**64 - 1):
        numbers = uniform(np.full(count, seed, np.uint64), positions)
        assert numbers.min() >= 0 and numbers.max() < 1
        bins = np.bincount((numbers * 100).astype(int), minlength=100)
        assert ((bins - count / 100) ** 2 / (count / 100)).sum() < 160  # chi-square, 99 degrees: p of 1e-4
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    first = uniform(np.full(count, 5, np.uint64), positions)
    second = uniform(np.full(count, 6, np.uint64), positions)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (42, 17), (2**64 - 1, 8191)])
def test_a_random_number_equals_its_definition(seed: int, position: int) -> None:
    """SplitMix64 in plain integers; a change here would change what a stored seed generates."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        return x ^ x >> 31

    got = uniform(np.array([seed], np.uint64), np.array([position], np.int32))[0]
    assert got == (mix((mix(seed) + position * 0x9E3779B97F4A7C15) & mask) >> 11) * 2.0**-53


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 2, 50, 513, 5000]),
    spread=st.sampled_from([0.0, 0.001, 1.0, 8.0, 1000.0]),
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 20.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 600]),
    top_p=st.sampled_from([0.0, 0.2, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_the_kept_tokens_are_those_of_the_definition(
    seed: int, vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Drawn with the extreme random numbers, the first and the last token kept; also by the path of the GPU."""
    logits = np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)
    probabilities = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    kept = probabilities >= min_p * (1 - 1e-6)
    if 0 < top_k < vocab:
        kept &= logits >= np.sort(logits)[-top_k]
    falling = np.sort(probabilities[kept])[::-1]
    mass = falling.cumsum() / falling.sum()
    # Rounding may decide where the nucleus ends: what is near its border may be in it or not.
    surely, perhaps = (int((mass < top_p + slack).sum()) for slack in (-1e-5, 1e-5))
    least = falling[[min(surely, len(falling) - 1), min(perhaps, len(falling) - 1)]]
    for random in (0.0, 0.3, 1 - 2.0**-53):
        token = draw(logits, float(logits.max()), temperature, top_k, top_p, min_p, random)
        on_device = draw_rows(
            torch.from_numpy(logits)[None],
            np.array([temperature], np.float32),
            np.array([top_k], np.int32),
            np.array([top_p], np.float32),
            np.array([min_p], np.float32),
            np.array([random]),
        )[0].item()
        for chosen in (token, on_device):
            assert kept[chosen] and probabilities[chosen] >= least[1] * (1 - 1e-5) - 1e-30
        if random in (0.0, 1 - 2.0**-53):
            certain = np.flatnonzero(kept & (probabilities > max(least[0] * (1 + 1e-5), 1e-12)))
            if len(certain):
                assert token <= certain[0] if random == 0.0 else token >= certain[-1]


def test_lower_bound_is_reached_by_enough_values_and_not_by_many() -> None:
    values = np.random.default_rng(0).normal(0, 1, 50000).astype(np.float32)
    for count in (1, 40, 200):
        assert count <= (values >= lower_bound(values, count)).sum() < 3 * count + 20
    assert (values >= lower_bound(values, 49999)).all()
