"""The plot of a run: service of the tenants and the service gap over time. Needs matplotlib, an optional extra."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plot_file import save_plot
from benchmarks.simulate.results import service_gap_bound
from benchmarks.simulate.simulation import Run


def plot(path: Path, title: str, run: Run) -> None:
    """Write the plot; the ending of the file's name says in which format. Raises BenchmarkError if it cannot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    figure.suptitle(title)
    service, gap = figure.subplots(2, 1, sharex=True)
    times = [moment for moment, _ in run.gap.service_curve]
    for column, tenant in enumerate(run.gap.tenants):
        service.plot(times, [row[column] for _, row in run.gap.service_curve], label=tenant)
    service.set_ylabel("service per weight, priced tokens")
    if len(run.gap.tenants) <= 10:
        service.legend()
    gap.plot([moment for moment, _ in run.gap.curve], [value for _, value in run.gap.curve])
    gap.axhline(service_gap_bound(run), linestyle="--", color="grey", label="bound")
    gap.set_ylabel("service gap")
    gap.set_xlabel("seconds")
    gap.legend()
    save_plot(figure, path)
