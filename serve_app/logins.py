"""Keys that come with requests: read from the header, and how often a source may try wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api import errors
from serve_app.client_address import ClientAddresses
from tenancy.failed_logins import FailedLogins

logger = logging.getLogger(__name__)


def bearer(headers: Headers) -> str:
    """The key of a request; empty where there is none, or more than one."""
    authorization = headers.getlist("authorization")
    scheme, _, key = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else ""


class Logins:
    """Bounds failed logins of each source to `per_minute` over all gateways; None is no bound."""

    def __init__(
        self, addresses: ClientAddresses, per_minute: int | None, gateways: Callable[[], int]
    ) -> None:
        """`gateways` tells how many there are: each counts for itself, up to its part."""
        self._addresses = addresses
        self._per_minute = per_minute
        self._gateways = gateways
        self._failed = FailedLogins()

    def check(self, scope: Scope, who: str | None) -> None:
        """Take note of a login with a key: of `who`, or a failed one. Raises ApiError 429 where the source has had too
        many of those; then it makes no difference what the key was."""
        if self._per_minute is None:
            return
        source = self._addresses.source(scope)
        limit = max(1, self._per_minute // self._gateways())
        wait_s = self._failed.wait_s(source, who, limit)
        if wait_s > 0:
            raise errors.too_many_failed_logins(1000 * wait_s)
        if who is not None:
            self._failed.accepted(source, who)
        elif self._failed.failed(source) == limit:
            logger.warning("%d logins from %s failed within a minute: more are not looked at", limit, source)
