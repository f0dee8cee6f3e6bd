"""Who can reach the server, and the keys that must not be reachable then."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from serve_app.config_errors import ConfigError
from tenancy.models import Tenant

_DEMO_KEY = re.compile(r"eh_\w+_demo")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def demo_key(tenants: Iterable[Tenant]) -> str | None:
    """The first key that everybody knows, if there is one: a demo tenant's, or one that looks like it."""
    for tenant in tenants:
        for key in (secret.get_secret_value() for secret in tenant.api_keys):
            if tenant.demo or _DEMO_KEY.fullmatch(key):
                return key
    return None


def refuse_demo_keys(tenants: Iterable[Tenant], host: str) -> None:
    """Raise ConfigError if there is a demo key and other machines can reach `host`."""
    if not is_loopback(host) and demo_key(tenants) is not None:
        raise ConfigError(
            f"http_options.host: {host!r} is not allowed while a tenant has a demo key; "
            "allowed: 127.0.0.1, ::1, localhost"
        )
