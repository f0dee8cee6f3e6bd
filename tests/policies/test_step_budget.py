"""Split of a step's tokens: bounds, max-min fairness, exact shares over time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.step_budget import PREFILL_FLOOR_TOKENS, prefill_floor, split_prefill_budget

TENANTS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.tuples(st.integers(0, 500), st.integers(1, 6400).map(lambda n: n / 64), st.integers(0, 200)),
    max_size=12,
)


def water_level_shares(
    pending: dict[str, int], weights: dict[str, float], budget: int, decoding: dict[str, int]
) -> dict[str, float]:
    """The split in real numbers, by bisection on the level: clamp(level * weight - decoding, floor, pending)."""
    floor = 1.0 if budget >= len(pending) else 0.0

    def tokens_at(tenant: str, level: float) -> float:
        return min(pending[tenant], max(floor, level * weights[tenant] - decoding[tenant]))

    low, high = 0.0, 1e9
    for _ in range(200):
        level = (low + high) / 2
        total = sum(tokens_at(t, level) for t in pending)
        low, high = (level, high) if total < budget else (low, level)
    return {t: tokens_at(t, high) for t in pending}


@settings(max_examples=300, deadline=None)
@given(tenants=TENANTS, budget=st.integers(-5, 2000), rotation=st.integers(0, 10**9))
def test_split_is_max_min_to_the_token(
    tenants: dict[str, tuple[int, float, int]], budget: int, rotation: int
) -> None:
    pending = {tenant: tokens for tenant, (tokens, _, _) in tenants.items()}
    weights = {tenant: weight for tenant, (_, weight, _) in tenants.items()}
    decoding = {tenant: rows for tenant, (_, _, rows) in tenants.items()}
    split = split_prefill_budget(pending, weights, budget, rotation, decoding)
    active = {tenant: tokens for tenant, tokens in pending.items() if tokens > 0}
    assert set(split) == set(active)
    assert sum(split.values()) == max(0, min(budget, sum(active.values())))
    assert all(0 <= split[tenant] <= tokens for tenant, tokens in active.items())
    if budget >= len(active):
        assert all(tokens >= 1 for tokens in split.values())
    if 0 < budget < sum(active.values()):
        exact = water_level_shares(active, weights, budget, decoding)
        assert all(abs(split[tenant] - exact[tenant]) < 1.0 + 1e-6 for tenant in active)


def test_everything_fits() -> None:
    assert split_prefill_budget({"a": 3, "b": 0, "c": 4}, {"a": 1, "b": 1, "c": 1}, 7) == {"a": 3, "c": 4}
    assert split_prefill_budget({}, {}, 7) == {}


def test_what_one_cannot_use_goes_to_the_others_by_weight() -> None:
    pending = {"small": 4, "a": 1000, "b": 1000}
    weights = {"small": 10.0, "a": 1.0, "b": 3.0}
    assert split_prefill_budget(pending, weights, 84) == {"small": 4, "a": 20, "b": 60}


def test_decodes_count_as_part_of_a_share() -> None:
    pending, weights = {"flood": 1000, "new": 32}, {"flood": 1.0, "new": 1.0}
    assert split_prefill_budget(pending, weights, 36, decoding={"flood": 28}) == {"flood": 4, "new": 32}
    assert split_prefill_budget(pending, weights, 24, decoding={"flood": 40}) == {"flood": 1, "new": 23}
    assert split_prefill_budget(pending, weights, 60, decoding={"flood": 4}) == {"flood": 28, "new": 32}


def test_a_tiny_weight_still_gets_a_token() -> None:
    for rotation in range(20):
        split = split_prefill_budget({"tiny": 100, "big": 100}, {"tiny": 0.001, "big": 1000.0}, 16, rotation)
        assert split == {"tiny": 1, "big": 15}


@pytest.mark.parametrize(
    ("weights", "budget"),
    [
        ({"a": 1.0, "b": 2.0}, 16),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, 16),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 5.0}, 2),  # fewer tokens than tenants
        ({"a": 3.0, "b": 7.0}, 1),
    ],
)
def test_over_many_steps_each_gets_its_exact_share(weights: dict[str, float], budget: int) -> None:
    steps = 2000
    total: Counter[str] = Counter()
    for step in range(steps):
        total.update(split_prefill_budget(dict.fromkeys(weights, 10_000), weights, budget, step))
    for tenant, weight in weights.items():
        assert total[tenant] / (steps * budget) == pytest.approx(weight / sum(weights.values()), rel=0.01)


def test_nobody_waits_long_for_a_token_when_there_are_few() -> None:
    weights = {f"t{i}": 1.0 for i in range(8)}
    last_turn = dict.fromkeys(weights, -1)
    for step in range(500):
        for tenant, tokens in split_prefill_budget(dict.fromkeys(weights, 9), weights, 2, step).items():
            if tokens:
                assert step - last_turn[tenant] <= 8, "one turn in four on average"
                last_turn[tenant] = step
    assert min(last_turn.values()) >= 490


def test_bad_weights() -> None:
    with pytest.raises(ValueError, match="positive"):
        split_prefill_budget({"a": 1}, {"a": 0.0}, 8)
    with pytest.raises(KeyError):
        split_prefill_budget({"a": 1}, {}, 8)


@pytest.mark.parametrize(
    ("budget", "waiting", "expected"),
    [(128, 1000, PREFILL_FLOOR_TOKENS), (128, 5, 5), (128, 0, 0), (20, 1000, 10), (1, 1000, 0)],
)
def test_prefill_floor(budget: int, waiting: int, expected: int) -> None:
    assert prefill_floor(budget, waiting) == expected
