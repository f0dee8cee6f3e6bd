"""The command line, without starting Ray."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from serve_app import cli, launch
from serve_app.launch import LaunchError, Overrides

SHIPPED = Path(__file__).parents[2] / "config.yaml"
runner = CliRunner()


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['evenhand', '--help']\n"
        "from serve_app.cli import app\n"
        "try:\n    app()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'ray', 'torch', 'transformers', 'fastapi', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
    assert "config" in done.stdout


def test_version() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("evenhand 0.")


def test_config_check() -> None:
    result = runner.invoke(cli.app, ["config", "check", str(SHIPPED)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{SHIPPED}: ok\n"


def test_config_check_of_a_bad_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SHIPPED.read_text().replace("dtype: bfloat16", "dtype: int3"))
    result = runner.invoke(cli.app, ["config", "check", str(path)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"error: {path}: applications[0].args.models[0].dtype: 'int3' is not allowed; "
        "allowed: auto, float32, bfloat16, float16\n"
    )


def test_serve_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, Overrides]] = []
    monkeypatch.setattr(launch, "serve", lambda path, overrides, echo: calls.append((path, overrides)))
    assert runner.invoke(cli.app, ["serve"]).exit_code == 0
    options = ["--host", "localhost", "--port", "9000", "--engine", "stub", "--policy", "fcfs"]
    assert runner.invoke(cli.app, ["serve", "other.yaml", *options]).exit_code == 0
    assert calls == [
        (Path("config.yaml"), Overrides()),
        (Path("other.yaml"), Overrides("localhost", 9000, "stub", "fcfs")),
    ]


def test_serve_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LaunchError("127.0.0.1:8000 is in use; choose another port with --port")

    monkeypatch.setattr(launch, "serve", fail)
    result = runner.invoke(cli.app, ["serve"])
    assert result.exit_code == 1
    assert result.stderr == "error: 127.0.0.1:8000 is in use; choose another port with --port\n"


def greet(name: str) -> None:
    """Say hello."""
    typer.echo(f"hello {name}")


group = typer.Typer(help="A group.")


@group.command()
def one() -> None:
    typer.echo("one")


@group.command()
def two() -> None:
    typer.echo("two")


def test_entry_points_become_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        EntryPoint(name=name, value=f"{__name__}:{name}", group=cli.COMMANDS_GROUP)
        for name in ("greet", "group")
    )
    monkeypatch.setattr(cli, "entry_points", lambda **wanted: points.select(**wanted))
    assert runner.invoke(cli.app, ["greet", "you"]).stdout == "hello you\n"
    assert runner.invoke(cli.app, ["group", "two"]).stdout == "two\n"
    assert "Say hello." in runner.invoke(cli.app, ["--help"]).stdout
    assert runner.invoke(cli.app, ["absent"]).exit_code == 2
