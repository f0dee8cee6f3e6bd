"""`evenhand ledger`: the usage that was recorded."""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

ledger_app = typer.Typer(help="Usage that was recorded.", no_args_is_help=True)


@ledger_app.callback()
def _ledger() -> None: ...


@ledger_app.command()
def export(
    data_dir: Annotated[Path, typer.Option(help="Of the server: data_dir, else var/PORT.")] = Path(
        "var/8000"
    ),
    since: Annotated[str | None, typer.Option(help="First UTC day, as 2026-01-31.")] = None,
    until: Annotated[str | None, typer.Option(help="Last UTC day.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    format: Annotated[str, typer.Option(help="csv or jsonl.")] = "csv",
) -> None:
    """One row per request on standard output; `price_nano` is in 1e-9 of the currency."""
    from tenancy.ledger import COLUMNS, LedgerFiles

    folder = data_dir / "ledger"
    if format not in ("csv", "jsonl"):
        _fail(f"--format {format}: allowed are csv and jsonl")
    if not folder.is_dir():
        _fail(f"{folder}: no ledger here")
    days = [_day(text) for text in (since, until)]
    table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    if format == "csv":
        table.writeheader()
    try:
        for row in LedgerFiles(folder).read(days[0], days[1], tenant):
            if format == "csv":
                table.writerow(row)
            else:
                typer.echo(json.dumps({**row, "timings": json.loads(row["timings"])}))
    except sqlite3.Error as error:
        _fail(f"{folder}: {error}")


def _day(text: str | None) -> date | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        _fail(f"{text}: expected a day, as 2026-01-31")
        raise AssertionError from None


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)
