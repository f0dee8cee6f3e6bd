"""Writing plots. Needs matplotlib, an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.workload import BenchmarkError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Raise BenchmarkError if no plot can be drawn: before the run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchmarkError(f"{path}: plots need matplotlib: pip install 'evenhand[plot]'") from None
    if not path.resolve().parent.is_dir():
        raise BenchmarkError(f"{path}: no such folder")


def save_plot(figure: Figure, path: Path) -> None:
    """The ending of the file's name says in which format. Raises BenchmarkError if it can not be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path}: cannot be written: {error}") from None
