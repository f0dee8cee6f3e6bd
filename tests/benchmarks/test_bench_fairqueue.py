"""`evenhand bench fairqueue`: the report; figures on a busy machine prove nothing."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from benchmarks.cli import app

COMMAND = ["fairqueue", "--queued", "500", "--tenants", "50", "--operations", "100"]


def test_json_has_the_stated_figures() -> None:
    result = CliRunner().invoke(app, [*COMMAND, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["queued"] == 500 and report["tenants"] == 50 and report["classes"] == 2
    assert 80 <= report["promises"] <= 120, "a fifth"
    times = {key: report[key] for key in report if key.startswith(("us_", "ms_"))}
    assert {
        "us_per_enqueue",
        "us_per_decision",
        "us_per_blocked_decision",
        "us_per_report",
        "ms_per_walk",
    } <= times.keys()
    assert all(value > 0 for value in times.values()), times


def test_table_for_people() -> None:
    result = CliRunner().invoke(app, COMMAND)
    assert result.exit_code == 0 and "us_per_enqueue" in result.stdout


def test_cost_grows_far_less_than_the_queue() -> None:
    """CPU time, on one thread: a hundred times the queue costs no ten times as much per operation."""
    from benchmarks.fairqueue import run

    small, large = run(200, 20, 2000), run(20_000, 2_000, 2000)
    assert large["us_per_enqueue"] < 10 * small["us_per_enqueue"], (small, large)
    assert large["us_per_blocked_decision"] < 10 * small["us_per_blocked_decision"], (small, large)
