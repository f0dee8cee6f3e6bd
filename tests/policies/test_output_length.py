"""Output-length prediction per tenant."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.output_length import OutputLengthPredictor


def test_mean_starts_from_the_default_and_follows_four_to_one() -> None:
    predictor = OutputLengthPredictor(default_tokens=100)
    assert predictor.predict("a", 1000) == 100
    predictor.observe("a", 50)
    assert predictor.predict("a", 1000) == 90
    predictor.observe("a", 0)
    assert predictor.predict("a", 1000) == 72
    assert predictor.predict("b", 1000) == 100, "tenants do not share a history"


def test_prediction_stays_between_one_and_max_tokens() -> None:
    predictor = OutputLengthPredictor(default_tokens=100)
    assert predictor.predict("a", 7) == 7
    assert predictor.quantile("a", 7) == 7
    for _ in range(60):
        predictor.observe("a", 0)
    assert predictor.predict("a", 1000) == 1
    assert predictor.quantile("a", 1000) == 1


def test_ninetieth_percentile_of_the_recent_history() -> None:
    predictor = OutputLengthPredictor(default_tokens=64, history=100)
    assert predictor.quantile("a", 1000) == 64
    for length in range(1, 101):
        predictor.observe("a", length)
    assert predictor.quantile("a", 1000) == 90
    assert predictor.quantile("a", 50) == 50
    for _ in range(100):
        predictor.observe("a", 5)
    assert predictor.quantile("a", 1000) == 5, "old lengths leave the history"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_quantile_covers_its_share_and_no_smaller_length_does(lengths: list[int], q: float) -> None:
    predictor = OutputLengthPredictor(history=40)
    for length in lengths:
        predictor.observe("a", length)
    value = predictor.quantile("a", 10_000, q)
    needed = math.ceil(q * len(lengths))
    assert sum(length <= value for length in lengths) >= needed
    assert sum(length < value for length in lengths) < needed


def test_the_tenant_not_observed_for_longest_is_forgotten() -> None:
    predictor = OutputLengthPredictor(default_tokens=64, max_tenants=2)
    for tenant in ("a", "b", "a", "c"):
        predictor.observe(tenant, 1000)
    assert predictor.predict("b", 5000) == 64
    assert predictor.predict("a", 5000) > 64
    assert predictor.predict("c", 5000) > 64


@pytest.mark.parametrize("name", ["default_tokens", "history", "max_tenants"])
def test_bad_settings(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        OutputLengthPredictor(**{name: 0})


@pytest.mark.parametrize("q", [0.0, 1.1, -0.5])
def test_bad_quantile(q: float) -> None:
    with pytest.raises(ValueError, match="q must be"):
        OutputLengthPredictor().quantile("a", 10, q)
