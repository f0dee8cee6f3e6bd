"""The command line. Nothing heavy is imported before a command needs it: help must be quick."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from serve_app import admin_cli, ledger_cli

COMMANDS_GROUP = "evenhand.commands"
"""Entry points of this group, each a typer app or a function, become commands under their names."""


class _Commands(TyperGroup):
    """The commands below and those of the entry points, each loaded when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(entry_points(group=COMMANDS_GROUP).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for entry_point in entry_points(group=COMMANDS_GROUP, name=cmd_name):
            found = entry_point.load()
            if not isinstance(found, typer.Typer):
                wrapped = typer.Typer()
                wrapped.command(name=cmd_name)(found)
                found = wrapped
            command = typer.main.get_command(found)
            command.name = cmd_name
            return command
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="evenhand",
    cls=_Commands,
    help="A multi-tenant LLM gateway and inference engine on Ray Serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Work with config files.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(admin_cli.tenants_app, name="tenants")
app.add_typer(admin_cli.keys_app, name="keys")
app.add_typer(ledger_cli.ledger_app, name="ledger")
app.command()(admin_cli.audit)


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
    policy: Annotated[
        str | None, typer.Option(help="Queue order of every model: vtc, fcfs, rpm, lcf, drr or dlpm.")
    ] = None,
) -> None:
    """Serve a config on this machine, in a Ray cluster of its own, until Ctrl-C."""
    from serve_app.config_errors import ConfigError
    from serve_app.launch import LaunchError, Overrides
    from serve_app.launch import serve as serve_config

    try:
        serve_config(config, Overrides(host, port, engine, policy), typer.echo)
    except (ConfigError, LaunchError) as error:
        _fail(str(error))


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="The config file.")]) -> None:
    """Check a config file without starting anything."""
    from serve_app.config_errors import ConfigError
    from serve_app.config_file import load_config, require_sources

    try:
        require_sources(load_config(file))
    except ConfigError as error:
        _fail(str(error))
    typer.echo(f"{file}: ok")


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def main() -> None:
    """The `evenhand` command."""
    app()


if __name__ == "__main__":
    main()
