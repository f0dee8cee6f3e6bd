"""`evenhand bench quota` on a real server."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from benchmarks.cli import app


def test_it_prints_its_figures() -> None:
    done = CliRunner().invoke(app, ["quota", "--tenants", "5", "--requests", "40", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["tenants"], report["limits_per_tenant"], report["requests"]) == (5, 5, 40)
    for name in ("reserve_ms", "settle_ms", "ping_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert report["reserve_ms"]["p50"] > report["ping_ms"]["p50"], "more than a round trip"
