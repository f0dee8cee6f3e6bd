"""The command line. Nothing heavy is imported before a command needs it: help must be quick."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated

import typer

COMMANDS_GROUP = "evenhand.commands"
"""Entry points of this group, each a typer app or a function, become commands under their names."""

app = typer.Typer(
    name="evenhand",
    help="A multi-tenant LLM gateway and inference engine on Ray Serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Work with config files.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evenhand {version('evenhand')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="The config file.")] = Path("config.yaml"),
    host: Annotated[str | None, typer.Option(help="Listen here instead of http_options.host.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Listen here instead of http_options.port.", min=1, max=65535)
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine of every model; `stub` makes tokens without a model.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Queue order of every model: vtc or fcfs.")] = None,
) -> None:
    """Serve a config on this machine, in a Ray cluster of its own. Ctrl-C lets running requests end and stops."""
    from serve_app.launch import LaunchError, Overrides
    from serve_app.launch import serve as serve_config
    from serve_app.settings import ConfigError

    try:
        serve_config(config, Overrides(host, port, engine, policy), typer.echo)
    except (ConfigError, LaunchError) as error:
        _fail(str(error))


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="The config file.")]) -> None:
    """Check a config file without starting anything."""
    from serve_app.settings import ConfigError, load_config

    try:
        load_config(file)
    except ConfigError as error:
        _fail(str(error))
    typer.echo(f"{file}: ok")


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def _add_commands() -> None:
    for entry_point in entry_points(group=COMMANDS_GROUP):
        # Loading one may be slow, so only the one that is asked for.
        if entry_point.name in sys.argv[1:2]:
            ...


def main() -> None:
    """The `evenhand` command."""
    app()
