"""Export of the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from serve_app.cli import app
from tenancy.ledger import LedgerFiles, LedgerRow

FIELDS = {
    "request": 'with "quotes", and', "tenant": "alpha", "key": "k", "model": "m", "class": "default",
    "outcome": "ok", "input_tokens": 1, "cached_tokens": 0, "output_tokens": 2, "price_nano": 3,
    "timings": {"total": 1.5},
}  # fmt: skip


def test_export(tmp_path: Path) -> None:
    LedgerFiles(tmp_path / "ledger").write([LedgerRow("a", 1_700_000_000_000_000, FIELDS)])

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["ledger", "export", "--data-dir", str(tmp_path), *arguments])

    header, line = run().output.splitlines()
    assert header.startswith("hold,at,request,tenant") and '"with ""quotes"", and",alpha' in line
    [line] = run("--format", "jsonl").output.splitlines()
    assert json.loads(line)["timings"] == {"total": 1.5}
    assert run("--since", "2023-11-15", "--format", "jsonl").output == ""
    assert "expected a day" in run("--since", "yesterday").output
    assert run("--format", "xml").exit_code == 1
    assert run("--data-dir", str(tmp_path / "none")).exit_code == 1
