"""How long an engine step takes: linear in what it computes, learned while the engine runs.

Recursive least squares with directional forgetting (Cao and Schwartz, "A directional forgetting algorithm
based on the decomposition of the information matrix", Automatica 36, 2000): a step takes away old knowledge
only in the direction that it teaches something about. Hours of decoding alone do not unlearn what a prompt
costs, and the information matrix stays positive definite without resets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_FORGETTING = 0.98  # a direction is learned from about its last 50 steps
_SCALES = np.array([1.0, 1e-2, 1e-1, 1e-4, 1e-5])  # features of a usual step become of the order of 1
_RIDGE = 1e-6
_SWEEPS = 4
_SHORTEST_SECONDS = 1e-4
_OUTLIER = 1.0  # relative error from which a step counts linearly, not quadratically: a hiccup is no trend
_STEP_LEVEL = 0.9

MAX_RESIDUAL = 10.0
"""Largest relative residual that is believed: beyond it a step was disturbed, not slow."""


class StepFeatures(NamedTuple):
    """What one step computes.

    `decode_context` is the sum of the context lengths of the decode rows, `prefill_context` the sum over
    prompt chunks of tokens times the positions each attends to on average. Their sum of tokens needs no
    coefficient of its own: it is prefill_tokens + decode_rows.
    """

    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    prefill_context: float = 0.0


@dataclass(frozen=True)
class StepEstimate:
    """Step time in plain numbers: seconds per unit of each feature, none negative.

    `residual` is the relative error that nine steps in ten stay below: upper = seconds * (1 + residual).
    """

    per_step: float
    per_prefill_token: float
    per_decode_row: float
    per_decode_context: float
    per_prefill_context: float
    residual: float

    def seconds(self, step: StepFeatures) -> float:
        """Expected time of a step."""
        return (
            self.per_step
            + self.per_prefill_token * step.prefill_tokens
            + self.per_decode_row * step.decode_rows
            + self.per_decode_context * step.decode_context
            + self.per_prefill_context * step.prefill_context
        )

    def upper_seconds(self, step: StepFeatures) -> float:
        """Time that nine steps in ten keep."""
        return self.seconds(step) * (1.0 + self.residual)


class QuantileTracker:
    """The running `level` quantile of a series of scores, corrected after each.

    Quantile tracking of Angelopoulos, Candes and Tibshirani, "Conformal PID control for time series
    prediction" (2023), section 2: up by rate * level after a miss, down by rate * (1 - level) otherwise, with
    a rate that follows how far scores lie from it. In the long run a share `level` of the scores lies at or below
    `value` whatever their distribution does, as long as they are bounded.
    """

    def __init__(self, level: float, *, start: float, lowest: float, highest: float) -> None:
        if not 0.0 < level < 1.0 or not lowest <= start <= highest:
            raise ValueError("level must be in (0, 1) and start between lowest and highest")
        self.level = level
        self.value = start
        self._lowest = lowest
        self._highest = highest
        self._size = 0.0

    def observe(self, score: float) -> None:
        """Learn from one score. Not finite is ignored."""
        if not np.isfinite(score):
            return
        score = min(max(score, self._lowest), self._highest)
        self._size = max(abs(score - self.value), 0.98 * self._size)
        step = 0.2 * max(self._size, 1e-3)
        self.value += step * self.level if score > self.value else -step * (1.0 - self.level)
        self.value = min(max(self.value, self._lowest), self._highest)


class StepTimeModel:
    """Learns step times. One `observe` per step, some tens of microseconds; `estimate` is a snapshot.

    The error is minimised relative to the prediction, so that short decode steps weigh as much as long ones.
    Coefficients are kept non-negative by coordinate descent: more work never predicts less time.
    """

    def __init__(self) -> None:
        size = len(_SCALES)
        self.observations = 0
        self._information: npt.NDArray[np.float64] = np.eye(size) * _RIDGE
        self._target: npt.NDArray[np.float64] = np.zeros(size)
        self._theta = [0.0] * size
        # Every step in its first minutes: wide at once, narrow once the model has been right for a while.
        self._residual = QuantileTracker(_STEP_LEVEL, start=0.25, lowest=0.0, highest=MAX_RESIDUAL)

    def observe(self, step: StepFeatures, seconds: float) -> None:
        """Learn that `step` took `seconds`. A time that is not finite and positive is ignored."""
        if not (np.isfinite(seconds) and seconds > 0.0):
            return
        x = np.array([1.0, *step]) * _SCALES
        predicted = float(x @ self._theta)
        size = max(predicted if self.observations else seconds, _SHORTEST_SECONDS)
        error = (seconds - predicted) / size
        if self.observations:
            self._residual.observe(error)
        weight = 1.0 / size
        if self.observations and abs(error) > _OUTLIER:
            weight *= (_OUTLIER / abs(error)) ** 0.5
        self._learn(x * weight, seconds * weight)
        self.observations += 1

    def estimate(self) -> StepEstimate | None:
        """The current coefficients; None before the first observation."""
        if not self.observations:
            return None
        per_step, prefill, row, decode_context, prefill_context = (
            theta * scale for theta, scale in zip(self._theta, _SCALES.tolist(), strict=True)
        )
        return StepEstimate(
            per_step, prefill, row, decode_context, prefill_context, residual=self._residual.value
        )

    def _learn(self, x: npt.NDArray[np.float64], y: float) -> None:
        known = self._information @ x
        strength = float(x @ known)
        if strength > 0.0:
            drop = (1.0 - _FORGETTING) / strength
            self._target -= known * (drop * float(x @ self._target))
            self._information -= np.outer(known, known * drop)
        self._information += np.outer(x, x)
        self._information[np.diag_indices_from(self._information)] += _RIDGE * (1.0 - _FORGETTING)
        self._target += x * y
        self._solve()

    def _solve(self) -> None:
        """Coordinate descent on the least-squares objective under theta >= 0, from the solution before."""
        rows, target, theta = self._information.tolist(), self._target.tolist(), self._theta
        for _ in range(_SWEEPS):
            for i, row in enumerate(rows):
                rest = sum(a * b for a, b in zip(row, theta, strict=True)) - row[i] * theta[i]
                theta[i] = max(0.0, (target[i] - rest) / row[i])
