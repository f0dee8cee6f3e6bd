"""The config file: Ray Serve's schema, with our settings in it, read and checked as a whole.

Unknown keys are refused at every level, also where Ray itself would drop them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.config_errors import ConfigError, Loc, describe, describe_unknown, format_path, unknown_keys
from serve_app.exposure import refuse_demo_keys
from serve_app.settings import AppSettings, UserConfig, parse_args, parse_user_config
from tenancy.models import Tenant, unpriced_model
from tenancy.tiers import with_tier

APP_IMPORT_PATH = "serve_app.app:build"
GATEWAY_DEPLOYMENT = "Gateway"


@dataclass(frozen=True)
class ServeConfig:
    """A checked config file. `document` is the whole of it as plain data, in Ray Serve's schema."""

    name: str
    document: dict[str, Any]
    application: int
    settings: AppSettings
    user_config: UserConfig
    host: str
    port: int

    def override(
        self,
        *,
        host: str | None = None,
        port: int | None = None,
        engine: str | None = None,
        policy: str | None = None,
        data_dir: str | None = None,
    ) -> ServeConfig:
        """The config with some values replaced, checked again as a whole.

        `engine` and `policy` go to every model. Raises ConfigError.
        """
        document = copy.deepcopy(self.document)
        http = document.setdefault("http_options", {})
        http.update({key: value for key, value in (("host", host), ("port", port)) if value is not None})
        app_args = document["applications"][self.application]["args"]
        if data_dir is not None:
            app_args["data_dir"] = data_dir
        for model in app_args["models"]:
            if engine is not None:
                model["engine"] = engine
            if policy is not None:
                model["scheduler"] = {**model.get("scheduler", {}), "policy": policy}
        return check_document(document, self.name)

    @property
    def application_name(self) -> str:
        """What Serve calls our application."""
        return str(self.document["applications"][self.application].get("name", "default"))

    @property
    def route_prefix(self) -> str:
        """What every path of the API begins with; empty for the usual `/`."""
        return str(self.document["applications"][self.application].get("route_prefix") or "/").rstrip("/")


def load_config(path: str | Path) -> ServeConfig:
    """Read and check a whole config file. Raises ConfigError with one line for the first mistake."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return check_document(document, str(path))


def check_document(document: Any, name: str) -> ServeConfig:
    """Check a config already read. `name` is what errors call it. Raises ConfigError."""
    from ray.serve.schema import ServeDeploySchema  # seconds to import: `--help` must not pay for it

    if not isinstance(document, dict):
        keys = ", ".join(ServeDeploySchema.model_fields)
        raise ConfigError(f"{name}: the file must hold a mapping; allowed keys: {keys}")
    for loc, allowed in unknown_keys(document, ServeDeploySchema):
        raise ConfigError(f"{name}: {format_path(loc)}: {describe_unknown(loc[-1], allowed)}")
    try:
        schema = ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe(error, ServeDeploySchema, document)}") from None

    ours = [i for i, app in enumerate(schema.applications) if app.import_path == APP_IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(
            f"{name}: applications: {len(ours)} with import_path {APP_IMPORT_PATH}; allowed: exactly one"
        )
    place: Loc = ("applications", ours[0])
    application = document["applications"][ours[0]]
    settings = parse_args(application.get("args", {}), (*place, "args"), name)
    user_config = UserConfig()
    for index, deployment in enumerate(application.get("deployments", [])):
        raw = deployment.get("user_config")
        where = (*place, "deployments", index, "user_config")
        if raw is None:
            continue
        if deployment["name"] != GATEWAY_DEPLOYMENT:
            raise ConfigError(f"{name}: {format_path(where)}: only {GATEWAY_DEPLOYMENT} takes a user_config")
        user_config = parse_user_config(raw, where, name)

    try:
        check_models(user_config, [model.id for model in settings.models])
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None

    host, port = schema.http_options.host, schema.http_options.port
    if not 1 <= port <= 65535:
        raise ConfigError(f"{name}: http_options.port: {port} is not allowed; allowed: 1 to 65535")
    keep_alive = schema.http_options.keep_alive_timeout_s
    if keep_alive <= 0:
        raise ConfigError(
            f"{name}: http_options.keep_alive_timeout_s: {keep_alive} is not allowed; allowed: more than 0"
        )
    try:
        refuse_demo_keys(user_config.tenants, host)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return ServeConfig(name, document, ours[0], settings, user_config, host, port)


def check_models(user_config: UserConfig, models: list[str]) -> None:
    """Raise ValueError where prices, limits or permissions name a model that is not served, or a price is missing."""
    places = {"prices": list(user_config.prices)}
    for name, tier in user_config.tiers.items():
        places[f"model_limits of tier {name!r}"] = list(tier.model_limits)
        places[f"models of tier {name!r}"] = list(tier.models or ())
    for tenant in user_config.tenants:
        places[f"model_limits of tenant {tenant.id!r}"] = list(tenant.model_limits)
        places[f"models of tenant {tenant.id!r}"] = list(tenant.models or ())
    for what, named in places.items():
        for model in named:
            if model not in models:
                raise ValueError(f"{what}: {model!r} is not a model id; allowed: {', '.join(models)}")
    # A tier by itself too: tenants made at run time may have it.
    anyone = {
        f"tier {name!r}": with_tier(Tenant(id=name, tier=name), user_config.tiers)
        for name in user_config.tiers
    }
    for who, tenant in {**anyone, **{f"tenant {t.id!r}": t for t in user_config.treated_tenants()}}.items():
        if (unpriced := unpriced_model(tenant, models, user_config.prices)) is not None:
            raise ValueError(f"{who} has a budget in cost, and prices has no {unpriced!r}; give it a price")


def require_sources(config: ServeConfig) -> None:
    """Raise ConfigError for a model that is not on this machine, though its source says so. Loads nothing."""
    from engine_actor.loading.source import LoadError, resolve_source

    for index, model in enumerate(config.settings.models):
        source = model.source
        if model.engine == "stub" or not source.startswith(("package:", "/", "./", "../", "~")):
            continue  # a hub id, or a path that a hub id may look like: the engine finds out
        try:
            resolve_source(source, model.revision)
        except LoadError as error:
            raise ConfigError(f"{config.name}: models[{index}].source: {error}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; a config file must not."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return node
