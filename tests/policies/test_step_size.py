"""How large a step may be, and how large a batch, before a target or the memory breaks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.latency_model import StepEstimate, StepFeatures
from policies.step_budget import (
    PREFILL_FLOOR_TOKENS,
    decode_batch_limit,
    decode_slack,
    memory_batch_limit,
    step_token_budget,
)

estimates = st.builds(
    StepEstimate,
    st.floats(0, 0.05),
    st.floats(0, 1e-3),
    st.floats(0, 1e-2),
    st.floats(0, 1e-5),
    st.floats(0, 1e-7),
    st.floats(0, 2),
)


@given(
    estimates,
    st.integers(0, 64),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.floats(-1, 2),
    st.integers(16, 512),
)
def test_the_budget_is_the_largest_that_fits(
    estimate: StepEstimate, rows: int, context: int, position: int, slack: float, most: int
) -> None:
    budget = step_token_budget(
        estimate,
        decode_rows=rows,
        decode_context=rows * context,
        prefill_position=position,
        slack=slack,
        max_num_batched_tokens=most,
    )

    def upper(tokens: int) -> float:
        prefill = tokens - rows
        return estimate.upper_seconds(
            StepFeatures(prefill, rows, rows * context, float(prefill * max(position, 1)))
        )

    assert 1 <= budget <= most
    floor = min(rows + PREFILL_FLOOR_TOKENS, most)
    assert budget >= floor
    if budget > floor:
        assert upper(budget) <= slack * (1 + 1e-6) + 1e-9
    if budget < most and budget >= floor:
        assert upper(budget + 1) > slack - 1e-9


@given(estimates, st.floats(0.001, 1), st.integers(0, 4000), st.integers(1, 256))
def test_the_batch_is_the_largest_that_keeps_the_target(
    estimate: StepEstimate, target: float, context: int, most: int
) -> None:
    limit = decode_batch_limit(estimate, target=target, mean_context=context, limit=most)

    def upper(rows: int) -> float:
        return estimate.upper_seconds(StepFeatures(PREFILL_FLOOR_TOKENS, rows, rows * context))

    assert 1 <= limit <= most
    if limit > 1:
        assert upper(limit) <= target * (1 + 1e-6)
    if limit < most:
        assert upper(limit + 2) > target * (1 - 1e-6)


def test_memory_limit_overflows_about_three_times_in_ten() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.5, 0.8, 200_000)
    limit = memory_batch_limit(
        mean_tokens=float(lengths.mean()), deviation=float(lengths.std()), kv_tokens=20_000, limit=10_000
    )
    batches = lengths[: len(lengths) // limit * limit].reshape(-1, limit).sum(axis=1)
    assert 0.2 < np.mean(batches > 20_000) < 0.4  # by the normal distribution 0.31
    assert memory_batch_limit(mean_tokens=100, deviation=0, kv_tokens=1000, limit=99) == 10
    assert memory_batch_limit(mean_tokens=100, deviation=50, kv_tokens=10**9, limit=32) == 32
    assert memory_batch_limit(mean_tokens=5000, deviation=50, kv_tokens=1000, limit=32) == 1


def test_slack_of_a_mean_target_is_earned_and_bounded_when_late() -> None:
    def slack(
        now: float, out: int, last: float, tpot: float | None = 0.1, itl: float | None = None
    ) -> float | None:
        return decode_slack(
            now, first_token_at=10.0, last_token_at=last, output_tokens=out, tpot=tpot, itl=itl
        )

    assert slack(10.0, 1, 10.0) == pytest.approx(0.1)
    assert slack(10.2, 5, 10.2) == pytest.approx(0.3)  # three tokens ahead
    assert slack(20.0, 5, 20.0) == pytest.approx(0.05)  # ten seconds late: half a period each, no more
    assert slack(10.2, 5, 10.2, itl=0.15) == pytest.approx(0.15)
    assert slack(10.3, 5, 10.2, tpot=None, itl=0.15) == pytest.approx(0.05)
    assert slack(10.0, 1, 10.0, tpot=None) is None
