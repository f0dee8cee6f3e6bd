"""Fits the `cpu` cost model to our own engine: `python -m benchmarks.simulate.fit [RUNS]`.

Runs workloads on the product's default model, times every step, and writes `data/cpu.json`. All their requests arrive
at once, so every run makes the same steps: of each step the shortest time of all runs counts, which is what it takes
when nobody else has the cores. The coefficients are the non-negative ones of least squared relative error.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cli import DEFAULT_SOURCE
from benchmarks.engine import run_workload
from benchmarks.simulate.cost_models import DATA, StepShape
from benchmarks.workload import other_prompts, read_workload, tokenise
from engine_actor.build import DEFAULT_CPU_KV_BYTES, EngineOptions, build_engine
from engine_actor.executor import PAGE_SIZE, Runner
from engine_actor.loading.source import resolve_source
from engine_actor.step import StepRecord, StepResult
from serve_app.text.load import load_tokenizer

COEFFICIENTS = ("base", "prefill_token", "decode_row", "decode_context", "prefill_pair")
WORKLOADS = ("mixed48", "single")
RUNS = 6

Floats = npt.NDArray[np.float64]


class TimingRunner(Runner):
    """Another runner with a note of the shape and the seconds of each step."""

    def __init__(self, inner: Runner) -> None:
        self.info, self.num_pages = inner.info, inner.num_pages
        self.steps: list[tuple[StepShape, float]] = []
        self._inner = inner

    def run(self, record: StepRecord) -> StepResult:
        started = time.perf_counter()
        result = self._inner.run(record)
        self.steps.append((StepShape.of(record), time.perf_counter() - started))
        return result


def shortest(runs: list[list[tuple[StepShape, float]]]) -> list[tuple[StepShape, float]]:
    """Each step with its shortest time. Raises ValueError if the runs did not make the same steps."""
    steps = []
    for same in zip(*runs, strict=True):
        if len({shape for shape, _ in same}) != 1:
            raise ValueError("two runs of one workload made different steps")
        steps.append((same[0][0], min(seconds for _, seconds in same)))
    return steps


def fit(steps: list[tuple[StepShape, float]]) -> tuple[dict[str, float], Floats]:
    """Coefficients in seconds per unit, and the relative error of each step."""
    features = np.array(
        [
            (1, shape.prefill_tokens, shape.decode_rows, shape.decode_context, shape.prefill_pairs)
            for shape, _ in steps
        ],
        np.float64,
    )
    seconds = np.array([measured for _, measured in steps])
    solution = _non_negative(features / seconds[:, None], np.ones(len(seconds)))
    return dict(zip(COEFFICIENTS, solution.tolist(), strict=True)), features @ solution / seconds - 1.0


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares over coefficients >= 0: drop the most negative one until none is left."""
    active = list(range(matrix.shape[1]))
    while True:
        scale = np.abs(matrix[:, active]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, active] / scale, target, rcond=None)[0] / scale
        if found.min() >= 0:
            break
        active.pop(int(np.argmin(found * scale)))
    solution = np.zeros(matrix.shape[1])
    solution[active] = found
    return solution


def main(runs: int) -> None:
    folder = Path(__file__).parents[1] / "workloads"
    built = build_engine(EngineOptions(source=DEFAULT_SOURCE))
    tokenizer = load_tokenizer(resolve_source(DEFAULT_SOURCE))
    steps: list[tuple[StepShape, float]] = []
    for name in WORKLOADS:
        requests = tokenise(read_workload(folder / f"{name}.jsonl"), tokenizer)
        run_workload(built, other_prompts(requests, built.vocab_size))
        timed = []
        for _ in range(runs):
            runner = TimingRunner(built.runner)
            run_workload(replace(built, runner=runner), requests)
            timed.append(runner.steps)
        steps += shortest(timed)
    coefficients, errors = fit(steps)
    info = built.runner.info
    report: dict[str, Any] = {
        "seconds_per": {name: float(f"{value:.4g}") for name, value in coefficients.items()},
        "kv_tokens": (built.runner.num_pages - 1) * PAGE_SIZE,
        "measured_on": {
            "processor": _processor(),
            "threads": info.threads,
            "executor": info.executor,
            "dtype": info.dtype,
            "kv_gib": DEFAULT_CPU_KV_BYTES / 2**30,
        },
        "steps": len(steps),
        "runs": runs,
        "median_relative_error": round(float(np.median(np.abs(errors))), 3),
    }
    (DATA / "cpu.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS)
