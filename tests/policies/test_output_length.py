"""Output-length prediction per tenant."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.output_length import DEFAULT_OUTPUT_LENGTH, LONGEST_SHARE, OutputLengthPredictor


def test_mean_starts_from_the_default_and_follows_four_to_one() -> None:
    predictor = OutputLengthPredictor()
    assert predictor.of("a") == DEFAULT_OUTPUT_LENGTH
    predictor.observe("a", 14)
    assert predictor.of("a").expected(1000) == 54
    predictor.observe("a", 0)
    assert predictor.of("a").expected(1000) == 43
    assert predictor.of("b").expected(1000) == 64, "tenants do not share a history"


def test_prediction_stays_between_one_and_max_tokens() -> None:
    predictor = OutputLengthPredictor()
    assert predictor.of("a").expected(7) == predictor.of("a").bound(7) == 7
    for _ in range(60):
        predictor.observe("a", 0)
    assert predictor.of("a").expected(1000) == predictor.of("a").bound(1000) == 1


def test_ninetieth_percentile_of_the_recent_history() -> None:
    predictor = OutputLengthPredictor(history=100)
    assert predictor.of("a").bound(1000) == 64
    for length in range(1, 101):
        predictor.observe("a", length)
    assert predictor.of("a").bound(1000) == 90
    assert predictor.of("a").bound(50) == 50
    for _ in range(100):
        predictor.observe("a", 5)
    assert predictor.of("a").bound(1000) == 5, "old lengths leave the history"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_quantile_covers_its_share_and_no_smaller_length_does(lengths: list[int]) -> None:
    predictor = OutputLengthPredictor(history=40)
    for length in lengths:
        predictor.observe("a", length)
    value = predictor.of("a").longest
    needed = math.ceil(LONGEST_SHARE * len(lengths))
    assert sum(length <= value for length in lengths) >= needed
    assert sum(length < value for length in lengths) < needed


def test_the_tenant_not_observed_for_longest_is_forgotten() -> None:
    predictor = OutputLengthPredictor(max_tenants=2)
    for tenant in ("a", "b", "a", "c"):
        predictor.observe(tenant, 1000)
    assert list(predictor.export()) == ["a", "c"]
    assert predictor.of("b") == DEFAULT_OUTPUT_LENGTH


def test_a_successor_goes_on_from_the_same_lengths() -> None:
    predictor = OutputLengthPredictor()
    for length in [10] * 20 + [500] * 4:
        predictor.observe("a", length)
    successor = OutputLengthPredictor()
    successor.restore(predictor.export())
    assert successor.of("a") == predictor.of("a")
    for _ in range(9):
        successor.observe("a", 10)
    assert successor.of("a").longest == 10, "and forgets what no longer holds"


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        OutputLengthPredictor(history=0)
