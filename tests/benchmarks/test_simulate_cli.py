"""`evenhand simulate`: its JSON fields, its table, its error lines, the plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.simulate.cli import simulate

STATED_FIELDS = {
    "policy",
    "completed",
    "total_tokens_per_s",
    "output_tokens_per_s",
    "service_gap_bound",
    "service_gap_max",
    "service_gap_mean",
    "jain",
    "median_tenant_ttft_s",
    "attainment_offered",
    "attainment_admitted",
    "goodput",
    "preemptions",
    "prefix_hit_rate",
    "tenants",
}


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_ms,tenant,input_tokens,output_tokens\n0,a,20,5\n10,b,30,6\n20,b,40,7\n")
    return str(path)


def test_json_has_every_stated_field(trace: str) -> None:
    result = invoke(trace, "--policy", "fcfs", "--json", "--cost-model", "a100-7b")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) >= STATED_FIELDS
    assert (report["policy"], report["completed"], report["scenario"]) == ("fcfs", 3, trace)
    assert set(report["tenants"]) == {"a", "b"}
    assert set(report["tenants"]["a"]) >= {"service", "ttft_s_mean", "ttft_s_p95"}
    assert report["tenants"]["b"]["service"] == 70 + 2 * 13


def test_table_names_tenants_and_figures(trace: str) -> None:
    output = invoke(trace).stdout
    assert "service_gap_max" in output and "ttft_s_mean" in output
    assert [line.split()[:3] for line in output.splitlines()[-2:]] == [["a", "1", "1"], ["b", "2", "2"]]


def test_speed_limit_and_limits_of_the_engine(trace: str) -> None:
    fast = json.loads(invoke(trace, "--json", "--speed", "2", "--limit", "2", "--max-num-seqs", "1").stdout)
    slow = json.loads(invoke(trace, "--json", "--limit", "2").stdout)
    assert fast["requests"] == 2
    assert fast["seconds"] > slow["seconds"], "one request after the other takes longer"


def test_targets_for_every_request_and_old_habits(trace: str) -> None:
    targets = ("--slo-ttft-ms", "100000", "--slo-tpot-ms", "1")
    report = json.loads(invoke(trace, "--json", "--policy", "fcfs", "--no-step-control", *targets).stdout)
    assert (report["attainment_offered"], report["goodput"]) == (0.0, 0.0)
    plain, batched, prefill = (
        json.loads(invoke(trace, "--json", *habit).stdout)
        for habit in ((), ("--request-level-batching",), ("--prefill-first",))
    )
    assert batched["ttft_s"]["p95"] > plain["ttft_s"]["p95"]
    assert prefill["steps"] >= plain["steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "SCENARIO: 'nothing' is not allowed; allowed: a trace file"),
        ([], "SCENARIO is missing"),
        (["vtc_arena", "--policy", "lottery"], "--policy: 'lottery' is not allowed; allowed: "),
        (["vtc_arena", "--cost-model", "abacus"], "--cost-model: 'abacus' is not allowed; allowed: cpu, "),
        (["missing.csv"], "missing.csv: cannot be read"),
        (["few_giant", "--kv-tokens", "1000"], "cannot run"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_plot_without_matplotlib_says_what_to_install(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = tmp_path / "plot.png"
    result = invoke(trace, "--plot", str(plot))
    assert result.exit_code == 1
    assert result.stderr == f"error: {plot}: plots need matplotlib: pip install 'evenhand[plot]'\n"


def test_plot_is_written(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert invoke(trace, "--plot", str(tmp_path / "plot.svg")).exit_code == 0
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()[:500]


def test_list_names_the_scenarios() -> None:
    assert "vtc_arena" in invoke("--list").stdout.split()
