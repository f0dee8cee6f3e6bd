"""Step times learned from noisy steps, and the quantile that follows them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.latency_model import QuantileTracker, StepEstimate, StepFeatures, StepTimeModel

TRUTH = StepEstimate(4e-3, 8e-5, 2e-4, 1.5e-7, 2e-8, 0.0)


def mixed_step(rng: np.random.Generator) -> StepFeatures:
    rows = int(rng.integers(0, 32))
    chunk = int(rng.choice([0, 0, 16, 64, 96])) or (0 if rows else 16)
    return StepFeatures(
        chunk, rows, rows * int(rng.integers(20, 800)), float(chunk * int(rng.integers(8, 900)))
    )


def mean_error(model: StepTimeModel, factor: float = 1.0) -> float:
    rng = np.random.default_rng(99)
    estimate = model.estimate()
    assert estimate is not None
    steps = [mixed_step(rng) for _ in range(200)]
    return float(np.mean([abs(estimate.seconds(s) / (factor * TRUTH.seconds(s)) - 1) for s in steps]))


def teach(model: StepTimeModel, rng: np.random.Generator, steps: int, factor: float = 1.0) -> None:
    for _ in range(steps):
        step = mixed_step(rng)
        model.observe(step, factor * TRUTH.seconds(step) * float(rng.lognormal(0.0, 0.1)))


def test_learns_all_coefficients_from_noisy_steps() -> None:
    model = StepTimeModel()
    assert model.estimate() is None
    teach(model, np.random.default_rng(0), 1000)
    assert mean_error(model) < 0.05
    estimate = model.estimate()
    assert estimate is not None
    assert estimate.per_prefill_token == pytest.approx(TRUTH.per_prefill_token, rel=0.1)
    assert estimate.per_decode_row == pytest.approx(TRUTH.per_decode_row, rel=0.2)


def test_hours_of_decoding_do_not_unlearn_what_a_prompt_costs() -> None:
    rng = np.random.default_rng(1)
    model = StepTimeModel()
    teach(model, rng, 600)
    decode = StepFeatures(0, 8, 3200, 0.0)
    for _ in range(20_000):
        model.observe(decode, TRUTH.seconds(decode) * float(rng.lognormal(0.0, 0.1)))
    assert mean_error(model) < 0.08


def test_follows_an_engine_that_becomes_three_times_slower() -> None:
    rng = np.random.default_rng(2)
    model = StepTimeModel()
    teach(model, rng, 500)
    teach(model, rng, 500, factor=3.0)
    assert mean_error(model, factor=3.0) < 0.2


def test_single_hiccups_change_little() -> None:
    rng = np.random.default_rng(3)
    model = StepTimeModel()
    for index in range(1000):
        step = mixed_step(rng)
        model.observe(step, TRUTH.seconds(step) * (20.0 if index % 100 == 99 else 1.0))
    assert mean_error(model) < 0.15


def test_nine_steps_in_ten_stay_below_the_upper_time() -> None:
    rng = np.random.default_rng(4)
    model = StepTimeModel()
    teach(model, rng, 300)
    kept = 0
    for _ in range(2000):
        step = mixed_step(rng)
        seconds = TRUTH.seconds(step) * float(rng.lognormal(0.0, 0.2))
        estimate = model.estimate()
        assert estimate is not None
        kept += seconds <= estimate.upper_seconds(step)
        model.observe(step, seconds)
    assert 0.87 <= kept / 2000 <= 0.93


@given(
    st.lists(
        st.tuples(
            st.integers(0, 8192),
            st.integers(0, 512),
            st.integers(0, 10**7),
            st.floats(0, 1e9),
            st.one_of(st.floats(1e-6, 100.0), st.sampled_from([math.nan, math.inf, 0.0, -1.0])),
        ),
        max_size=80,
    )
)
def test_any_series_of_steps_leaves_a_sane_estimate(steps: list[tuple[int, int, int, float, float]]) -> None:
    """Finite, non-negative, hence more work never predicts less time: whatever was measured."""
    model = StepTimeModel()
    for *features, seconds in steps:
        model.observe(StepFeatures(*features), seconds)
    estimate = model.estimate()
    if estimate is None:
        assert not any(math.isfinite(seconds) and seconds > 0 for *_, seconds in steps)
        return
    numbers = (estimate.per_step, estimate.per_prefill_token, estimate.per_decode_row)
    numbers += (estimate.per_decode_context, estimate.per_prefill_context, estimate.residual)
    assert all(math.isfinite(number) and number >= 0 for number in numbers)


def test_the_kept_share_holds_through_drift() -> None:
    """The promise level is 0.97: with scores that wander, jump and change their spread, 95 % are kept."""
    rng = np.random.default_rng(5)
    tracker = QuantileTracker(0.97, start=0.5, lowest=0.0, highest=10.0)
    kept = []
    for index in range(6000):
        centre = 0.2 + 0.2 * math.sin(index / 300) + (1.0 if 2000 <= index < 2600 else 0.0)
        score = centre + float(rng.normal(0.0, 0.05 if index < 4000 else 0.4))
        kept.append(score <= tracker.value)
        tracker.observe(score)
    assert np.mean(kept) >= 0.95
    assert min(np.mean(kept[i : i + 500]) for i in range(0, 6000, 500)) >= 0.92


def test_a_quantile_ignores_what_is_no_number_and_stays_in_bounds() -> None:
    tracker = QuantileTracker(0.9, start=0.5, lowest=0.0, highest=2.0)
    tracker.observe(math.nan)
    assert tracker.value == 0.5
    for _ in range(300):
        tracker.observe(50.0)
    assert tracker.value == pytest.approx(2.0, abs=0.01)
    for _ in range(3000):
        tracker.observe(-50.0)
    assert tracker.value == pytest.approx(0.0, abs=0.01)
    with pytest.raises(ValueError, match="level"):
        QuantileTracker(1.0, start=0.5, lowest=0.0, highest=1.0)
