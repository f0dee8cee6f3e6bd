"""The admin API, /admin/v1: tenants and keys at run time, and who changed them. Its keys open nothing else."""

from __future__ import annotations

import hmac
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import SecretStr
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.admin_bodies import KeyRequest, RotateRequest, parsed, read_json
from serve_app.api import errors
from serve_app.api.errors import ApiError, invalid_request
from serve_app.logins import Logins, bearer
from tenancy.directory import TenantDirectory
from tenancy.directory_store import Change, ConflictError, DirectoryStore, Unchanged
from tenancy.keys import new_key
from tenancy.models import KeyRecord, Price, Tenant, unpriced_model
from tenancy.quota import QuotaUnavailable
from tenancy.tiers import with_tier

_LIMIT = re.compile("[0-9]{1,4}")
_ENTRY = re.compile("[0-9]{1,19}(-[0-9]{1,19})?")
"""An id of a Redis stream, below 2**64."""


class Admin:
    """Routes over a directory and its store. Off (404) without keys."""

    def __init__(
        self, directory: TenantDirectory, models: list[str], routes: list[str], logins: Logins
    ) -> None:
        """`models` are the ids that are served, `routes` what a key may be limited to."""
        self._directory = directory
        self._logins = logins
        self._models = models
        self._scopes = routes
        self.keys: Mapping[str, SecretStr] = {}
        """Who may use it: key by name. Empty: it is off."""
        self.store: DirectoryStore | None = None
        self.prices: Mapping[str, Price] = {}

    def routes(self) -> list[Route]:
        """Of the ASGI app."""
        return [
            self._route("/tenants", GET=self._list_tenants, POST=self._create_tenant),
            self._route(
                "/tenants/{id}", GET=self._show_tenant, PATCH=self._change_tenant, DELETE=self._delete_tenant
            ),
            self._route("/tenants/{id}/keys", GET=self._list_keys, POST=self._create_key),
            self._route("/keys/{id}", GET=self._show_key, PATCH=self._change_key, DELETE=self._revoke_key),
            self._route("/keys/{id}/rotate", POST=self._rotate_key),
            self._route("/audit", GET=self._audit),
        ]

    def _route(self, path: str, **methods: Callable[[Request, str], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            who = self._authenticate(request)
            method = methods.get(request.method)
            if method is None:
                raise errors.method_not_allowed()
            try:
                return await method(request, who)
            except ConflictError as error:
                raise ApiError("conflict", f"The change was not made: {error}.") from None
            except (QuotaUnavailable, RedisError):
                raise ApiError(
                    "quota_store_unavailable", "Redis does not answer. Try again shortly."
                ) from None

        # Every method, so that without a key nobody learns which there are.
        return Route(
            f"/admin/v1{path}", endpoint, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        )

    def _authenticate(self, request: Request) -> str:
        """Who asks. Raises ApiError 404 where the API is off, 401, 429."""
        if not self.keys:
            raise errors.not_found()
        given, found = bearer(request.headers), ""
        for name, key in self.keys.items():  # all of them, whatever matches: the time tells nothing
            expected = key.get_secret_value().encode()
            if hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected):
                found = name
        if given:
            self._logins.check(request.scope, f"+admin {found}" if found else None)
        if not found:
            raise errors.invalid_api_key()
        return found

    # Tenants ------------------------------------------------------------------------------------------------

    async def _list_tenants(self, request: Request, who: str) -> Response:
        return JSONResponse({"data": [self._shown(id) for id in self._directory.tenants()]})

    async def _show_tenant(self, request: Request, who: str) -> Response:
        return JSONResponse(self._shown(self._existing(request.path_params["id"]).id))

    async def _create_tenant(self, request: Request, who: str) -> Response:
        tenant = self._valid(await read_json(request))
        if tenant.demo:
            raise invalid_request("demo cannot be set here.", "demo")
        if self._directory.get(tenant.id) is not None:
            raise ApiError("conflict", f"The tenant {tenant.id!r} exists already.")
        if (before := self._directory.managed_tenant(tenant.id)) is not None:  # one that was deleted
            tenant = tenant.model_copy(update={"generation": before.generation + 1})
        await self._apply(who, self._tenant_change("create", None, tenant))
        return JSONResponse(self._shown(tenant.id), 201)

    async def _change_tenant(self, request: Request, who: str) -> Response:
        """Replaces the fields that are given, each as a whole; null takes one away."""
        changes = await read_json(request)
        old = self._stated(request)
        if changes.get("id", old.id) != old.id:
            raise invalid_request("A tenant's id cannot be changed.", "id")
        stated = json.loads(old.model_dump_json(exclude={"api_keys"}, exclude_unset=True))
        tenant = self._valid(
            {name: value for name, value in {**stated, **changes}.items() if value is not None},
            old.generation,
        )
        if tenant.demo != old.demo:
            raise invalid_request("demo cannot be set here.", "demo")
        await self._apply(who, self._tenant_change("change", old, tenant))
        return JSONResponse(self._shown(tenant.id))

    async def _delete_tenant(self, request: Request, who: str) -> Response:
        """Its keys are revoked, also for a later tenant with its id; what it has used stays in the ledger."""
        old = self._stated(request)
        keys = [key for key in self._directory.keys(old.id) if not key.revoked]
        await self._apply(
            who,
            *(self._key_change("revoke", key, key.model_copy(update={"revoked": True})) for key in keys),
            self._tenant_change("delete", old, Tenant(id=old.id, deleted=True, generation=old.generation)),
        )
        return JSONResponse({"id": old.id, "deleted": True})

    def _existing(self, id: str) -> Tenant:
        tenant = self._directory.get(id)
        if tenant is None:
            raise ApiError("not_found", f"There is no tenant {errors.quote(id)}.")
        return tenant

    def _stated(self, request: Request) -> Tenant:
        """The existing tenant without what it has from its tier."""
        id = self._existing(request.path_params["id"]).id
        stated = self._directory.as_stated(id)
        assert stated is not None
        return stated

    def _shown(self, id: str) -> dict[str, Any]:
        """The tenant as it is treated, where it comes from, and why its keys are refused if its tier is gone."""
        tenant, source = self._directory.tenants()[id]
        shown = tenant.model_dump(
            mode="json", exclude={"api_keys", "deleted", "generation"}, exclude_none=True
        )
        reason = self._directory.unusable(id)
        return {**shown, "source": source, **({"unusable": reason} if reason else {})}

    def _valid(self, data: dict[str, Any], generation: int = 0) -> Tenant:
        tenant = parsed(Tenant, data)
        if tenant.api_keys or tenant.deleted:
            raise invalid_request("api_keys and deleted cannot be set here; create keys instead.")
        if tenant.generation != generation:
            raise invalid_request("generation cannot be set here.", "generation")
        try:
            treated = with_tier(tenant, self._directory.tiers)
        except ValueError as error:
            raise invalid_request(f"{error}.", "tier") from None
        for field, models in (("model_limits", treated.model_limits), ("models", treated.models or ())):
            for model in models:
                self._require_model(model, field)
        self._require_prices(treated)
        return tenant

    def _tenant_change(self, action: str, old: Tenant | None, new: Tenant) -> Change:
        return Change(action, self._directory.managed_tenant(new.id), new, was=old)

    # Keys ---------------------------------------------------------------------------------------------------

    async def _list_keys(self, request: Request, who: str) -> Response:
        tenant = self._existing(request.path_params["id"])
        return JSONResponse({"data": [_key(key) for key in self._directory.keys(tenant.id)]})

    async def _show_key(self, request: Request, who: str) -> Response:
        return JSONResponse(_key(self._existing_key(request)))

    async def _create_key(self, request: Request, who: str) -> Response:
        """The answer is the only place that ever shows the key."""
        data = await read_json(request)
        tenant = self._existing(request.path_params["id"])
        fields = self._key_fields(data, tenant)
        record, key = self._new_key(
            KeyRecord(id="0" * 12, tenant=tenant.id, digest="0" * 64, created_at=0), **fields
        )
        await self._apply(who, self._while_tenant_stays(tenant.id), Change("create", None, record))
        return JSONResponse({**_key(record), "key": key}, 201)

    async def _change_key(self, request: Request, who: str) -> Response:
        data = await read_json(request)
        old = self._existing_key(request)
        tenant = self._existing(old.tenant)
        new = old.model_copy(update=self._key_fields(data, tenant))
        await self._apply(who, self._key_change("change", old, new))
        return JSONResponse(_key(new))

    async def _revoke_key(self, request: Request, who: str) -> Response:
        """Refused on every gateway within a second; answers that are being streamed run to their end."""
        old = self._existing_key(request)
        new = old.model_copy(update={"revoked": True})
        await self._apply(who, self._key_change("revoke", old, new))
        return JSONResponse(_key(new))

    async def _rotate_key(self, request: Request, who: str) -> Response:
        """A new key with the same scopes; the old one ends after the overlap."""
        overlap = parsed(RotateRequest, await read_json(request)).overlap_s
        old = self._existing_key(request)
        tenant = self._existing(old.tenant)
        now = int(time.time())
        if old.revoked or (old.expires_at is not None and old.expires_at <= now):
            raise invalid_request("This key is not valid any more: create a new one.")
        ends = now + overlap if old.expires_at is None else min(old.expires_at, now + overlap)
        record, key = self._new_key(old)
        ended = old.model_copy(update={"expires_at": ends})
        await self._apply(
            who,
            self._while_tenant_stays(tenant.id),
            Change("rotate", None, record),
            self._key_change("rotate", old, ended),
        )
        return JSONResponse({**_key(record), "key": key, "replaces": _key(ended)}, 201)

    def _new_key(self, template: KeyRecord, **fields: Any) -> tuple[KeyRecord, str]:
        id, key = new_key()
        fields |= {"id": id, "digest": self._directory.digest(key), "created_at": int(time.time())}
        return template.model_copy(update=fields), key

    def _existing_key(self, request: Request) -> KeyRecord:
        key = self._directory.key(request.path_params["id"])
        if key is None:
            raise ApiError("not_found", f"There is no key {errors.quote(request.path_params['id'])}.")
        return key

    def _key_fields(self, data: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
        asked = parsed(KeyRequest, data)
        for model in asked.models or []:
            self._require_model(model, "models")
            if not tenant.may_use(model):
                raise invalid_request(f"The tenant may not use {model!r}.", "models")
        for route in asked.routes or []:
            if route not in self._scopes:
                raise invalid_request(
                    f"{errors.quote(route)} is not a route; allowed: {', '.join(self._scopes)}.", "routes"
                )
        if asked.limits is not None and asked.limits.has_cost_budget:
            priced = tenant.model_copy(update={"limits": asked.limits})
            self._require_prices(priced)
        fields = {name: getattr(asked, name) for name in asked.model_fields_set - {"expires_in_s"}}
        for name in ("models", "routes"):
            if fields.get(name) is not None:
                fields[name] = tuple(fields[name])
        if "expires_in_s" in asked.model_fields_set:
            seconds = asked.expires_in_s
            fields["expires_at"] = None if seconds is None else int(time.time()) + seconds
        return fields

    def _require_model(self, model: str, field: str) -> None:
        if model not in self._models:
            raise invalid_request(
                f"{errors.quote(model)} is not a model id; allowed: {', '.join(self._models)}.", field
            )

    def _require_prices(self, tenant: Tenant) -> None:
        if (model := unpriced_model(tenant, self._models, self.prices)) is not None:
            raise invalid_request(f"A budget in cost needs a price for {model!r} in the config.", "limits")

    def _while_tenant_stays(self, id: str) -> Unchanged:
        """A key of a tenant that somebody deletes at this moment would wake up with a later tenant of its id."""
        return Unchanged(id, self._directory.managed_tenant(id))

    def _key_change(self, action: str, old: KeyRecord, new: KeyRecord) -> Change:
        return Change(action, self._directory.managed_key(new.id), new, was=old)

    # Both ---------------------------------------------------------------------------------------------------

    async def _audit(self, request: Request, who: str) -> Response:
        limit = request.query_params.get("limit", "100")
        if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= 1000:
            raise invalid_request("limit must be 1 to 1000.", "limit")
        before = request.query_params.get("before")
        if before is not None and not _ENTRY.fullmatch(before):
            raise invalid_request("before must be the id of an entry.", "before")
        entries = await self._required_store().audit(before, int(limit))
        return JSONResponse({"data": [asdict(entry) for entry in entries]})

    async def _apply(self, who: str, *steps: Change | Unchanged) -> None:
        await self._required_store().apply(who, steps)
        changes = [step for step in steps if isinstance(step, Change)]
        # Here at once, so that whoever made the change can use it; elsewhere it arrives on its way.
        self._directory.merge_managed(
            {c.after.id: c.after for c in changes if isinstance(c.after, Tenant)},
            {c.after.id: c.after for c in changes if isinstance(c.after, KeyRecord)},
        )

    def _required_store(self) -> DirectoryStore:
        if self.store is None or not self._directory.complete:
            raise ApiError("quota_store_unavailable", "Redis does not answer. Try again shortly.")
        return self.store


def _key(key: KeyRecord) -> dict[str, Any]:
    return key.model_dump(mode="json", exclude={"digest"}, exclude_none=True)
