"""The comparison's result: figures of each engine's turns, as JSON, as a table and as a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plot_file import check_plot, save_plot
from benchmarks.workload import BenchmarkError


@dataclass(frozen=True)
class Turn:
    """One run of the workload by one engine: tokens made, seconds of each part it was handed over in."""

    output_tokens: int
    seconds: list[float]
    decode_tokens_per_s: float | None = None

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / sum(self.seconds)


def engine_figures(
    turns: Mapping[str, Sequence[Turn]], details: Mapping[str, str], sequential: bool
) -> dict[str, dict[str, Any]]:
    """Medians over an engine's turns, and the first engine's over each one's. Milliseconds where the name says so."""
    figures: dict[str, dict[str, Any]] = {}
    for name, runs in turns.items():
        rates = [turn.rate for turn in runs]
        figures[name] = {
            "detail": details[name],
            "output_tokens_per_s": round(statistics.median(rates), 1),
            "runs": [round(rate, 1) for rate in rates],
        }
        decode = [turn.decode_tokens_per_s for turn in runs if turn.decode_tokens_per_s is not None]
        if decode:
            figures[name]["decode_tokens_per_s"] = round(statistics.median(decode), 1)
            figures[name]["decode_runs"] = [round(rate, 1) for rate in decode]
        if sequential:
            first = statistics.median(turn.seconds[0] for turn in runs)
            later = statistics.median(statistics.median(turn.seconds[1:] or turn.seconds) for turn in runs)
            figures[name] |= {"first_ms": round(first * 1e3, 1), "later_ms": round(later * 1e3, 1)}
    ours = next(iter(figures.values()))
    for each in figures.values():
        for figure, ratio in (
            ("output_tokens_per_s", "ours_over_it"),
            ("decode_tokens_per_s", "decode_ours_over_it"),
        ):
            if figure in ours and figure in each:
                each[ratio] = round(ours[figure] / each[figure], 2)
    return figures


def machine() -> dict[str, Any]:
    """What kind of machine this is, without its name."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0))}


_COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "ours_over_it": "ours/it",
    "decode_tokens_per_s": "decode tokens/s",
    "decode_ours_over_it": "ours/it",
    "first_ms": "first, ms",
    "later_ms": "later, ms",
}


def _rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The table's cells, its head first. Columns that no engine has are left out."""
    engines = report["engines"]
    columns = [name for name in _COLUMNS if any(name in figures for figures in engines.values())]
    rows = [["engine", *(_COLUMNS[name] for name in columns), "runs"]]
    for name, figures in engines.items():
        cells = [str(figures.get(column, "")) for column in columns]
        rows.append([name, *cells, " ".join(map(str, figures["runs"]))])
    return rows


def table(report: Mapping[str, Any]) -> str:
    """A line per engine."""
    rows = _rows(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown(report: Mapping[str, Any]) -> str:
    """The same in Markdown, with what was run above it."""
    head, *body = (f"| {' | '.join(row)} |" for row in _rows(report))
    rule = "|---" * len(_rows(report)[0]) + "|"
    title = (
        f"{report['requests']} requests, {report['input_tokens']} tokens in, {report['output_tokens']} out; "
        f"median of {report['repeat']} rounds; {report['machine']['cpu']}, {report['machine']['cores']} cores"
    )
    return "\n".join([title, "", head, rule, *body]) + "\n"


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Bars of the medians, a mark for each run. Needs matplotlib. Raises BenchmarkError if it can not be written."""
    from matplotlib.figure import Figure

    engines = report["engines"]
    figure = Figure(figsize=(8, 1 + 0.5 * len(engines)), layout="constrained")
    axes = figure.subplots()
    for place, figures in enumerate(engines.values()):
        axes.barh(place, figures["output_tokens_per_s"], color="tab:blue" if place else "tab:orange")
        axes.plot(figures["runs"], [place] * len(figures["runs"]), "k|")
    axes.set_yticks(range(len(engines)), list(engines))
    axes.invert_yaxis()
    axes.set_xlabel("output tokens/s")
    save_plot(figure, path)


def check_outputs(paths: Sequence[Path]) -> None:
    """Raise BenchmarkError if one of them can not be written: before the run, not after it."""
    for path in paths:
        if path.suffix not in _WRITERS:
            check_plot(path)
        elif not path.resolve().parent.is_dir():
            raise BenchmarkError(f"{path}: no such folder")


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write it as the file's ending says: .json, .md, any other is a plot. Raises BenchmarkError if it can not."""
    if path.suffix not in _WRITERS:
        return plot(report, path)
    try:
        path.write_text(_WRITERS[path.suffix](report), encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be written: {error.strerror}") from None


_WRITERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    ".json": lambda report: json.dumps(report, indent=1) + "\n",
    ".md": markdown,
}
