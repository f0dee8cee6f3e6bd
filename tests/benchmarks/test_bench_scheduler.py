"""`evenhand bench scheduler`: a steady state, and plain JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.scheduler import measure


def test_the_load_is_steady() -> None:
    report = measure(running=16, steps=200)
    assert report["running"] > 15
    assert report["finished_per_step"] > 0
    assert 0 < report["tree_us_per_step"] < report["us_per_step"]
    assert report["us_per_request"] * report["running"] == pytest.approx(report["us_per_step"], rel=0.02)


def test_json_on_stdout_alone() -> None:
    result = CliRunner().invoke(app, ["scheduler", "--json", "--running", "8", "--steps", "20"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert {"running", "us_per_step", "us_per_request"} <= set(report)


def test_a_table_without_json() -> None:
    result = CliRunner().invoke(app, ["scheduler", "--running", "8", "--steps", "20"])
    assert result.exit_code == 0 and "us_per_request" in result.stdout
