"""`evenhand bench engine` behind its command line: build the engine, warm it up, run the workload, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine import RunLog, run_workload
from benchmarks.figures import budget_figures, figures, median_run
from benchmarks.workload import (
    BenchmarkError,
    check_fits,
    other_prompts,
    read_workload,
    tokenise,
)
from engine_actor.build import BuiltEngine, EngineOptions, build_engine, model_length
from engine_actor.loading.source import resolve_source
from serve_app.text.load import load_tokenizer
from serve_app.text.tokenizer import byte_tokenizer


def run(
    workload: Path,
    options: EngineOptions,
    *,
    sequential: bool,
    repeat: int,
    dump: Path | None,
    budgets: Sequence[int],
) -> dict[str, Any]:
    """The report. With `budgets` the workload runs with each of them too, in turns with the one of `options`.

    Raises BenchmarkError for a workload or an engine that can not run, LoadError for a model.
    """
    rows = read_workload(workload)
    _write_dump(dump, [])  # a bad path is found now, not after the run
    if options.engine == "stub":
        tokenizer = byte_tokenizer()
    else:
        tokenizer = load_tokenizer(resolve_source(options.source, options.revision))
    requests = tokenise(rows, tokenizer)
    try:
        built = build_engine(options)
    except ValueError as error:
        raise BenchmarkError(str(error)) from None
    check_fits(requests, model_length(built.scheduler, built.runner.num_pages), built.vocab_size)

    _say("warming up on other prompts")
    run_workload(built, other_prompts(requests, built.vocab_size))
    others = sorted(set(budgets) - {built.scheduler.max_num_batched_tokens})
    engines = [built, *(_with_budget(built, budget) for budget in others)]
    runs: list[list[RunLog]] = [[] for _ in engines]
    for number in range(1, repeat + 1):
        _say(f"timed run {number} of {repeat}")
        for engine, logs in zip(engines, runs, strict=True):
            logs.append(run_workload(engine, requests, sequential))
    _write_dump(dump, [request.token_ids for request in median_run(runs[0]).requests])
    report = figures(built, requests, runs[0])
    if budgets:
        by_budget = zip((engine.scheduler.max_num_batched_tokens for engine in engines), runs, strict=True)
        report["budgets"] = budget_figures(dict(by_budget))
    return report


def _with_budget(built: BuiltEngine, budget: int) -> BuiltEngine:
    """Prefill chunks as large as the budget."""
    limits = replace(built.scheduler, max_num_batched_tokens=budget, prefill_chunk_size=budget)
    return replace(built, scheduler=limits)


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _write_dump(path: Path | None, outputs: list[list[int]]) -> None:
    """Raises BenchmarkError when the file cannot be written."""
    if path is None:
        return
    lines = (json.dumps({"index": index, "token_ids": ids}) + "\n" for index, ids in enumerate(outputs))
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be written: {error.strerror}") from None
