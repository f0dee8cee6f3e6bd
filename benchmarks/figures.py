"""Figures of a run: rates, times to first token, gaps between tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.engine import RequestLog, RunLog
from benchmarks.workload import BenchmarkRequest
from engine_actor.build import BuiltEngine

_DIGITS = 3


def median_run(runs: Sequence[RunLog]) -> RunLog:
    """The run of median duration; the slower of the two middle ones of an even number."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def figures(
    built: BuiltEngine, requests: Sequence[BenchmarkRequest], runs: Sequence[RunLog]
) -> dict[str, Any]:
    """The report of the median run as plain data for JSON. Times are in milliseconds unless named otherwise.

    A figure that does not exist, as the gaps of requests with one token, is None.
    """
    run = median_run(runs)
    info, limits = built.runner.info, built.scheduler
    output_tokens = sum(len(request.token_ids) for request in run.requests)
    return {
        "requests": len(requests),
        "input_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": output_tokens,
        "cached_tokens": sum(request.cached_tokens for request in run.requests),
        "seconds": _round(run.seconds),
        "output_tokens_per_s": _round(output_tokens / run.seconds),
        "cpu_seconds": _round(run.cpu_seconds),
        "ttft_ms": _ttft(run.requests),
        "itl_ms": _itl(run.requests),
        "groups": _groups(requests, run),
        "decode": decode(run),
        "steps": run.steps,
        "scheduler_ms_per_step": _round(run.scheduler_seconds / run.steps * 1e3),
        "model_ms_per_step": _round(run.model_seconds / run.steps * 1e3),
        "model_parts": {name: _round(part / run.model_seconds) for name, part in run.part_seconds.items()},
        "roofline": _roofline(built, run, output_tokens),
        "dtype": info.dtype,
        "quantization": info.quantization,
        "attention_backend": info.attention_backend,
        "threads": info.threads,
        "executor": info.executor,
        "fallback_reason": info.fallback_reason,
        "device": info.device,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "prefix_cache": limits.prefix_caching,
        "preemptions": run.preemptions,
        "runs_output_tokens_per_s": [_round(output_tokens / other.seconds) for other in runs],
        "version": version("evenhand"),
    }


def _roofline(built: BuiltEngine, run: RunLog, output_tokens: int) -> dict[str, Any] | None:
    """None where the machine's ceilings can not be measured, or the type is one they are not measured for."""
    info = built.runner.info
    if built.model is None or info.device != "cpu" or info.dtype != "bfloat16":
        return None
    from benchmarks.roofline import Roofline
    from engine_actor.native.build import NativeUnavailable
    from engine_actor.native.ceilings import measure_ceilings
    from engine_actor.native.executor import NativeExecutor

    try:
        ceilings = measure_ceilings(info.threads)
    except NativeUnavailable:
        return None
    weight_bytes = built.executor.weight_bytes if isinstance(built.executor, NativeExecutor) else None
    roofline = Roofline(built.model, info.quantization, ceilings, weight_bytes)
    return roofline.report(run.records, run.seconds, output_tokens)


def budget_figures(runs: Mapping[int, Sequence[RunLog]]) -> list[dict[str, Any]]:
    """A line for each token budget, smallest first, of its median run: what a smaller one costs, what it brings."""
    rates = {budget: _rate(median_run(logs)) for budget, logs in runs.items()}
    return [
        {
            "max_num_batched_tokens": budget,
            "output_tokens_per_s": _round(rate),
            "of_best": _round(rate / max(rates.values())),
            "max_gap_ms": _itl(median_run(runs[budget]).requests)["max"],
            "runs_max_gap_ms": [_itl(log.requests)["max"] for log in runs[budget]],
        }
        for budget, rate in sorted(rates.items())
    ]


def _rate(run: RunLog) -> float:
    return sum(len(request.token_ids) for request in run.requests) / run.seconds


def decode(run: RunLog) -> dict[str, Any] | None:
    """The steps in which every row decoded and no prompt was computed; None if there were none.

    `output_tokens_per_s` is their tokens by their wall time, what is between the steps included: the rate that
    llama.cpp's batched benchmark calls S_TG when the whole prompt phase comes first. A prompt's last chunk of one
    token looks like a decoding row and counts as one.
    """
    steps = [
        (len(record.length), seconds)
        for record, seconds in zip(run.records, run.step_seconds, strict=True)
        if record.is_last_chunk.all() and (record.length == 1).all()
    ]
    if not steps:
        return None
    tokens, seconds = sum(rows for rows, _ in steps), sum(seconds for _, seconds in steps)
    return {
        "steps": len(steps),
        "rows_per_step": _round(tokens / len(steps)),
        "output_tokens_per_s": _round(tokens / seconds),
    }


def table(report: dict[str, Any]) -> str:
    """The report for people: a figure a line."""
    lines = []
    for name, value in report.items():
        if name == "groups":
            lines += [f"{'group ' + group:<26} {_inline(figures)}" for group, figures in value.items()]
        elif name == "budgets":
            lines += [f"{'budget':<26} {_inline(figures)}" for figures in value]
        else:
            lines.append(f"{name:<26} {_inline(value)}")
    return "\n".join(lines)


def _inline(value: Any) -> str:
    if value == {}:
        return "-"
    if isinstance(value, dict):
        return "  ".join(
            f"{key} ({_inline(part)})" if isinstance(part, dict) else f"{key} {_inline(part)}"
            for key, part in value.items()
        )
    if isinstance(value, list):
        return "  ".join(map(_inline, value))
    return "-" if value is None else str(value)


def _groups(requests: Sequence[BenchmarkRequest], run: RunLog) -> dict[str, Any]:
    members: dict[str, list[RequestLog]] = {}
    for request, log in zip(requests, run.requests, strict=True):
        if request.group is not None:
            members.setdefault(request.group, []).append(log)
    return {name: _group(logs) for name, logs in members.items()}


def _group(logs: Sequence[RequestLog]) -> dict[str, Any]:
    gaps = _gaps_ms(logs)
    return {
        "max_gap_ms": _round(max(gaps)) if gaps else None,
        "median_gap_ms": _percentile(gaps, 50),
        "ttft_ms": _ttft(logs),
    }


def _ttft(logs: Sequence[RequestLog]) -> dict[str, float | None]:
    times = [(log.token_times[0] - log.arrival) * 1e3 for log in logs]
    return {"p50": _percentile(times, 50), "p95": _percentile(times, 95)}


def _itl(logs: Sequence[RequestLog]) -> dict[str, float | None]:
    gaps = _gaps_ms(logs)
    percentiles = {f"p{level}": _percentile(gaps, level) for level in (50, 95, 99)}
    return {**percentiles, "max": _round(max(gaps)) if gaps else None}


def _gaps_ms(logs: Sequence[RequestLog]) -> list[float]:
    return [float(gap) for log in logs for gap in np.diff(log.token_times) * 1e3]


def _percentile(values: Sequence[float], level: int) -> float | None:
    return _round(float(np.percentile(values, level))) if values else None


def _round(value: float) -> float:
    return round(value, _DIGITS)
