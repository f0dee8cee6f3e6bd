"""`evenhand tenants`, `evenhand keys` and `evenhand audit`: the admin API from the command line."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

KEY_VARIABLE = "EVENHAND_ADMIN_KEY"
URL_VARIABLE = "EVENHAND_URL"

tenants_app = typer.Typer(help="Tenants of a running server.", no_args_is_help=True)
keys_app = typer.Typer(help="API keys of a running server.", no_args_is_help=True)

Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Where the server listens.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="FIELD=JSON, such as weight=2; may be given again.")
]
_DEFAULT_URL = "http://127.0.0.1:8000"


@tenants_app.command("list")
def list_tenants(url: Url = _DEFAULT_URL) -> None:
    """All tenants, one JSON object a line."""
    for tenant in _call(url, "GET", "/tenants")["data"]:
        _print(tenant)


@tenants_app.command("show")
def show_tenant(id: str, url: Url = _DEFAULT_URL) -> None:
    """One tenant."""
    _print(_call(url, "GET", f"/tenants/{_quoted(id)}"))


@tenants_app.command("create")
def create_tenant(id: str, settings: Settings = None, url: Url = _DEFAULT_URL) -> None:
    """A new tenant. It has no key yet."""
    _print(_call(url, "POST", "/tenants", {**_fields(settings), "id": id}))


@tenants_app.command("update")
def update_tenant(id: str, settings: Settings = None, url: Url = _DEFAULT_URL) -> None:
    """Replace fields, each as a whole: --set 'limits={"requests_per_minute": 60}'."""
    _print(_call(url, "PATCH", f"/tenants/{_quoted(id)}", _fields(settings)))


@tenants_app.command("delete")
def delete_tenant(id: str, url: Url = _DEFAULT_URL) -> None:
    """Remove a tenant: its keys are refused from now on."""
    _print(_call(url, "DELETE", f"/tenants/{_quoted(id)}"))


@keys_app.command("list")
def list_keys(tenant: str, url: Url = _DEFAULT_URL) -> None:
    """The keys of a tenant, one JSON object a line, without the keys themselves."""
    for key in _call(url, "GET", f"/tenants/{_quoted(tenant)}/keys")["data"]:
        _print(key)


@keys_app.command("create")
def create_key(tenant: str, settings: Settings = None, url: Url = _DEFAULT_URL) -> None:
    """A new key, shown this once. Fields: name, models, routes, limits, expires_in_s."""
    _print(_call(url, "POST", f"/tenants/{_quoted(tenant)}/keys", _fields(settings)))


@keys_app.command("update")
def update_key(id: str, settings: Settings = None, url: Url = _DEFAULT_URL) -> None:
    """Replace fields of a key."""
    _print(_call(url, "PATCH", f"/keys/{_quoted(id)}", _fields(settings)))


@keys_app.command("rotate")
def rotate_key(
    id: str,
    overlap_s: Annotated[int, typer.Option(help="Seconds that the old key stays valid.", min=0)] = 86_400,
    url: Url = _DEFAULT_URL,
) -> None:
    """A new key with the same scopes, shown this once."""
    _print(_call(url, "POST", f"/keys/{_quoted(id)}/rotate", {"overlap_s": overlap_s}))


@keys_app.command("revoke")
def revoke_key(id: str, url: Url = _DEFAULT_URL) -> None:
    """Refuse a key from now on."""
    _print(_call(url, "DELETE", f"/keys/{_quoted(id)}"))


def audit(
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=1000)] = 100, url: Url = _DEFAULT_URL
) -> None:
    """Who changed which tenant or key, the newest first, one JSON object a line."""
    for entry in _call(url, "GET", f"/audit?limit={limit}")["data"]:
        _print(entry)


def _call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        _fail(f"set {KEY_VARIABLE} to a key of user_config.admin.keys")
    request = urllib.request.Request(
        f"{url.rstrip('/')}/admin/v1{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        # Straight to it, whatever HTTP_PROXY says: the key goes nowhere else.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=15) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        _fail(_message(error))
    except (OSError, ValueError) as error:
        _fail(f"{url}: {error}")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"
    if error.code == 404 and message == "There is nothing at this address.":
        return "the admin API is off: user_config.admin.keys turns it on"
    return message


def _fields(settings: list[str] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for setting in settings or []:
        name, found, text = setting.partition("=")
        if not found:
            _fail(f"--set {setting}: expected FIELD=JSON")
        try:
            fields[name] = json.loads(text)
        except ValueError:
            fields[name] = text  # a plain word is what it says
    return fields


def _quoted(id: str) -> str:
    return urllib.parse.quote(id, safe="")


def _print(value: Any) -> None:
    typer.echo(json.dumps(value))


def _fail(message: str) -> Any:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)
