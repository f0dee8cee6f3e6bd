"""Who a key belongs to: the tenants of the config and those managed at run time, in memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tenancy.keys import KeyHasher
from tenancy.models import KeyRecord, Limits, Tenant, Tier, check_unambiguous
from tenancy.tiers import with_tier

logger = logging.getLogger(__name__)

Source = Literal["config", "managed"]


@dataclass(frozen=True)
class Identity:
    """Who sent a request, by the key alone. `tenant` is narrowed to the models of the key."""

    tenant: Tenant
    key_id: str
    routes: tuple[str, ...] | None = None
    limits: Limits | None = None
    expires_at: int | None = None

    def may_call(self, route: str) -> bool:
        """Whether the key opens this route."""
        return self.routes is None or route in self.routes


@dataclass(frozen=True, repr=False)
class _Snapshot:
    by_id: dict[str, Tenant]
    by_digest: dict[bytes, Identity]
    unusable: dict[str, str]


class TenantDirectory:
    """Tenants by key and by id. Identity comes from the key alone.

    The config's tenants and keys are the base; a managed one stands in for a base one with the same id. What is
    handed out has the values of its tier. The id of a config key is its fingerprint. `secret` is the server secret
    that all gateways of a system share. Raises ValueError for tenants that share an id or a key.

    A tenant that does not fit the tiers of the config any more is `unusable`: its keys are refused, for its limits are
    not known.
    """

    def __init__(
        self,
        tenants: Iterable[Tenant],
        secret: bytes,
        clock: Callable[[], float] = time.time,
        tiers: Mapping[str, Tier] | None = None,
    ) -> None:
        self._hasher = KeyHasher(secret)
        self._clock = clock
        self._base: dict[str, Tenant] = {}
        self._base_keys: dict[str, KeyRecord] = {}
        self._managed: dict[str, Tenant] = {}
        self._managed_keys: dict[str, KeyRecord] = {}
        self.complete = True
        """False until managed tenants are known: a key may have been revoked."""
        self.tiers: Mapping[str, Tier] = {}
        self._snapshot = _Snapshot({}, {}, {})
        self.update(tenants, tiers)

    def __repr__(self) -> str:
        return f"TenantDirectory({len(self._snapshot.by_id)} tenants)"

    def authenticate(self, key: str) -> Identity | None:
        """Whose key this is, else None. Unknown, wrong, revoked, disabled, empty, non-ASCII and over-long
        keys all take this one path: one keyed hash, one look-up."""
        identity = self._snapshot.by_digest.get(self._hasher.digest(key))
        if identity is None or (identity.expires_at is not None and identity.expires_at <= self._clock()):
            return None
        return identity

    def get(self, tenant_id: str) -> Tenant | None:
        """The tenant with this id, enabled or not; None for one that was deleted."""
        return self._snapshot.by_id.get(tenant_id)

    def tenants(self) -> dict[str, tuple[Tenant, Source]]:
        """Every tenant by id, and where it comes from."""
        return {
            id: (tenant, "managed" if id in self._managed else "config")
            for id, tenant in sorted(self._snapshot.by_id.items())
        }

    def as_stated(self, tenant_id: str) -> Tenant | None:
        """A tenant without what it has from its tier: as the config or the admin API stated it."""
        return self._managed.get(tenant_id) or self._base.get(tenant_id)

    def unusable(self, tenant_id: str) -> str | None:
        """Why all keys of a tenant are refused, if they are for this reason: it does not fit the tiers."""
        return self._snapshot.unusable.get(tenant_id)

    def keys(self, tenant_id: str | None = None) -> list[KeyRecord]:
        """The keys of one tenant, or of all, revoked and expired ones included."""
        found = {**self._base_keys, **self._managed_keys}.values()
        return sorted((k for k in found if tenant_id in (None, k.tenant)), key=lambda k: (k.created_at, k.id))

    def key(self, key_id: str) -> KeyRecord | None:
        """The key with this id."""
        return self._managed_keys.get(key_id) or self._base_keys.get(key_id)

    def managed_tenant(self, tenant_id: str) -> Tenant | None:
        """The tenant as it is stored, if it is managed at run time."""
        return self._managed.get(tenant_id)

    def managed_key(self, key_id: str) -> KeyRecord | None:
        """The key as it is stored, if it is managed at run time."""
        return self._managed_keys.get(key_id)

    def managed(self) -> tuple[dict[str, Tenant], dict[str, KeyRecord]]:
        """All that is managed at run time, as it is stored: tenants and keys by id."""
        return dict(self._managed), dict(self._managed_keys)

    def update(self, tenants: Iterable[Tenant], tiers: Mapping[str, Tier] | None = None) -> None:
        """Replace all tenants and tiers of the config at once: a key that is gone is refused from the next call on. On
        ValueError the old ones stay."""
        tenants = tuple(tenants)
        check_unambiguous(tenants)
        self.tiers = tiers or {}
        self._base = {tenant.id: tenant.model_copy(update={"api_keys": ()}) for tenant in tenants}
        self._base_keys = {}
        for tenant in tenants:
            for key in (secret.get_secret_value() for secret in tenant.api_keys):
                digest, id = self._hasher.digest(key), self._hasher.fingerprint(key)
                self._base_keys[id] = KeyRecord(id=id, tenant=tenant.id, digest=digest.hex(), created_at=0)
        self._snapshot = self._build()

    def update_managed(self, tenants: Mapping[str, Tenant], keys: Mapping[str, KeyRecord]) -> None:
        """Replace all that is managed at run time."""
        self._managed, self._managed_keys = dict(tenants), dict(keys)
        self.complete = True
        self._snapshot = self._build()

    def merge_managed(self, tenants: Mapping[str, Tenant], keys: Mapping[str, KeyRecord]) -> None:
        """Take these changes to what is managed at run time."""
        self.update_managed({**self._managed, **tenants}, {**self._managed_keys, **keys})

    def digest(self, key: str) -> str:
        """What is stored instead of a key, 64 hex digits."""
        return self._hasher.digest(key).hex()

    def fingerprint(self, key: str) -> str:
        """What logs may show of a key."""
        return self._hasher.fingerprint(key)

    def secret_check(self) -> str:
        """Tells whether two gateways have the same server secret, and nothing about it."""
        return self._hasher.cache_salt("+secret check")

    def cache_namespace(self, tenant: Tenant) -> str:
        """The prefix-cache namespace of a tenant: its own, or the one of all tenants that chose to share."""
        return self._hasher.cache_salt("+shared" if tenant.shared_prefix_cache else _only(tenant))

    def request_digest(self, tenant: Tenant, content: bytes) -> str:
        """What may be kept of something that a tenant sent in order to know it again."""
        return self._hasher.request_digest(_only(tenant).encode() + b"\0" + content)

    def _build(self) -> _Snapshot:
        merged = {**self._base, **self._managed}
        by_id: dict[str, Tenant] = {}
        unusable: dict[str, str] = {}
        for id, stated in merged.items():
            if stated.deleted:
                continue
            try:
                by_id[id] = with_tier(stated, self.tiers)
            except ValueError as error:
                by_id[id], unusable[id] = stated, str(error)
                if id not in self._snapshot.unusable:
                    logger.error("%s: its keys are refused", error)
        by_digest: dict[bytes, Identity] = {}
        for key in {**self._base_keys, **self._managed_keys}.values():
            tenant = by_id.get(key.tenant)
            if tenant is None or not tenant.enabled or key.revoked or tenant.id in unusable:
                continue
            if key.models is not None:
                allowed = tuple(m for m in key.models if tenant.may_use(m))
                tenant = tenant.model_copy(update={"models": allowed})
            by_digest[bytes.fromhex(key.digest)] = Identity(
                tenant, key.id, key.routes, key.limits, key.expires_at
            )
        return _Snapshot(by_id, by_digest, unusable)


def _only(tenant: Tenant) -> str:
    """Names this tenant and no other, not even one that had its id and was deleted."""
    return f"{tenant.id}+{tenant.generation}" if tenant.generation else tenant.id
