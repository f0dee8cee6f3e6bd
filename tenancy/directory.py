"""Who a key belongs to: the tenants of the config, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenancy.keys import KeyHasher
from tenancy.models import Tenant, check_unambiguous


@dataclass(frozen=True, repr=False)
class _Snapshot:
    by_id: dict[str, Tenant]
    by_digest: dict[bytes, Tenant]


class TenantDirectory:
    """Tenants by key and by id. Identity comes from the key alone.

    `secret` is the server secret that all gateways of a system share. Raises ValueError for tenants that
    share an id or a key.
    """

    def __init__(self, tenants: Iterable[Tenant], secret: bytes) -> None:
        self._hasher = KeyHasher(secret)
        self._snapshot = self._build(tenants)

    def __repr__(self) -> str:
        return f"TenantDirectory({len(self._snapshot.by_id)} tenants)"

    def authenticate(self, key: str) -> Tenant | None:
        """The enabled tenant that holds `key`, else None. Unknown, wrong, disabled, empty, non-ASCII and
        over-long keys all take this one path: one keyed hash, one look-up."""
        return self._snapshot.by_digest.get(self._hasher.digest(key))

    def get(self, tenant_id: str) -> Tenant | None:
        """The tenant with this id, enabled or not."""
        return self._snapshot.by_id.get(tenant_id)

    def update(self, tenants: Iterable[Tenant]) -> None:
        """Replace all tenants at once: a key that is gone is refused from the next call on. On ValueError
        the old tenants stay."""
        self._snapshot = self._build(tenants)

    def fingerprint(self, key: str) -> str:
        """What logs may show of a key."""
        return self._hasher.fingerprint(key)

    def cache_salt(self, tenant_id: str) -> str:
        """The prefix-cache namespace of a tenant."""
        return self._hasher.cache_salt(tenant_id)

    def _build(self, tenants: Iterable[Tenant]) -> _Snapshot:
        tenants = tuple(tenants)
        check_unambiguous(tenants)
        by_id: dict[str, Tenant] = {}
        by_digest: dict[bytes, Tenant] = {}
        for tenant in tenants:
            keyless = tenant.model_copy(update={"api_keys": ()})
            by_id[tenant.id] = keyless
            if tenant.enabled:
                by_digest.update(
                    (self._hasher.digest(key.get_secret_value()), keyless) for key in tenant.api_keys
                )
        return _Snapshot(by_id, by_digest)
