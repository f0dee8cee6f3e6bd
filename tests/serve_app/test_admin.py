"""The admin API over a real Redis: what it takes, what it refuses, and that it shows a key once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.testclient import TestClient
from typer.testing import CliRunner

from serve_app import admin_cli
from serve_app.admin import Admin
from serve_app.api.errors import ApiError
from serve_app.cli import app as cli
from serve_app.client_address import ClientAddresses
from serve_app.gateway import _api_error_response
from serve_app.logins import Logins
from tenancy.directory import TenantDirectory
from tenancy.directory_store import DirectoryStore
from tenancy.embedded_redis import EmbeddedRedis
from tenancy.guarded_redis import GuardedRedis
from tenancy.models import Limits, Price, Tenant, Tier
from tenancy.redis import connect

KEY = "admin_key_of_the_tests_0001"
CONFIG = Tenant.model_validate({"id": "alpha", "api_keys": ["eh_alpha_config"], "models": ["m"]})


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def admin() -> Admin:
    directory = TenantDirectory([CONFIG], b"s" * 32)
    logins = Logins(ClientAddresses([], behind_haproxy=False), None, lambda: 1)
    admin = Admin(directory, ["m", "n"], ["/v1/models", "/v1/completions"], logins)
    admin.keys = {"ann": SecretStr("another_admin_key_of_tests"), "bob": SecretStr(KEY)}
    admin.prices = {"m": Price(input=1.0)}
    return admin


@pytest.fixture
def client(admin: Admin, redis_url: str) -> Iterator[TestClient]:
    app = Starlette(routes=admin.routes(), exception_handlers={ApiError: _api_error_response})
    with TestClient(app, headers={"Authorization": f"Bearer {KEY}"}) as client:

        async def open_store() -> None:
            server = connect(redis_url + "?socket_timeout=10")
            await server.flushall()
            admin.store = DirectoryStore(server, GuardedRedis(server, "probe"))

        assert client.portal is not None
        client.portal.call(open_store)
        yield client


def error(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_f02_without_an_admin_key_there_is_nothing(client: TestClient, admin: Admin) -> None:
    for path in ("/tenants", "/tenants/alpha", "/tenants/alpha/keys", "/keys/0", "/keys/0/rotate", "/audit"):
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            for header in ("", "Bearer eh_alpha_config", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer é"):
                answer = client.request(
                    method, f"/admin/v1{path}", headers={"Authorization": header.encode()}
                )
                assert "invalid API key" in error(answer, 401)
    admin.keys = {}
    assert error(client.get("/admin/v1/tenants"), 404) == "There is nothing at this address."


def test_a_tenant_and_its_keys_from_first_to_last(client: TestClient, admin: Admin) -> None:
    directory = admin._directory
    made = client.post("/admin/v1/tenants", json={"id": "new", "limits": {"requests_per_minute": 5}})
    assert made.status_code == 201 and made.json()["source"] == "managed"
    made = client.post("/admin/v1/tenants/new/keys", json={"name": "ci", "models": ["m"], "expires_in_s": 60})
    assert made.status_code == 201
    id, key = made.json()["id"], made.json()["key"]
    assert key.startswith(f"eh_{id}_") and len(key) > 50
    found = directory.authenticate(key)
    assert found is not None and found.tenant.models == ("m",)

    rotated = client.post(f"/admin/v1/keys/{id}/rotate", json={"overlap_s": 30})
    assert rotated.status_code == 201
    newer = rotated.json()
    assert newer["models"] == ["m"] and newer["name"] == "ci" and newer["replaces"]["id"] == id
    assert newer["replaces"]["expires_at"] <= made.json()["created_at"] + 32
    assert directory.authenticate(key) and directory.authenticate(newer["key"]), "both, in the overlap"
    at_once = client.post(f"/admin/v1/keys/{newer['id']}/rotate", json={"overlap_s": 0}).json()
    assert directory.authenticate(newer["key"]) is None and directory.authenticate(at_once["key"])

    assert client.delete(f"/admin/v1/keys/{at_once['id']}").json()["revoked"] is True
    assert directory.authenticate(at_once["key"]) is None
    changed = client.patch("/admin/v1/tenants/new", json={"weight": 2.0}).json()
    assert (changed["weight"], changed["limits"]["requests_per_minute"]) == (2.0, 5)
    listed = client.get("/admin/v1/tenants/new/keys")
    assert len(listed.json()["data"]) == 3
    assert client.delete("/admin/v1/tenants/new").status_code == 200
    assert directory.authenticate(key) is None
    error(client.get("/admin/v1/tenants/new"), 404)
    error(client.patch(f"/admin/v1/keys/{id}", json={}), 404)

    audit = client.get("/admin/v1/audit").json()["data"]
    assert {entry["who"] for entry in audit} == {"bob"}
    assert [entry["action"] for entry in reversed(audit)] == [
        "create", "create", "rotate", "rotate", "rotate", "rotate", "revoke", "change", "revoke", "revoke", "delete",
    ]  # fmt: skip
    for text in (listed.text, json.dumps(audit), client.get("/admin/v1/tenants").text):
        for secret in (
            *(k.split("_", 2)[2] for k in (key, newer["key"], at_once["key"])),
            directory.digest(key),
        ):
            assert secret not in text


def test_a_tenant_of_the_config_can_be_changed(client: TestClient, admin: Admin) -> None:
    assert client.get("/admin/v1/tenants/alpha").json()["source"] == "config"
    changed = client.patch("/admin/v1/tenants/alpha", json={"limits": {"cost_per_day": 2.5}, "models": ["m"]})
    assert "needs a price for 'n'" in error(changed, 400)
    changed = client.patch("/admin/v1/tenants/alpha", json={"limits": {"tokens_per_day": 9}})
    assert changed.json()["source"] == "managed"
    found = admin._directory.authenticate("eh_alpha_config")
    assert found is not None and found.tenant.limits.tokens_per_day == 9
    [key] = client.get("/admin/v1/tenants/alpha/keys").json()["data"]
    client.delete(f"/admin/v1/keys/{key['id']}")
    assert admin._directory.authenticate("eh_alpha_config") is None


def test_f19_keys_of_a_deleted_tenant_stay_dead_when_its_id_is_used_again(
    client: TestClient, admin: Admin
) -> None:
    directory = admin._directory
    client.post("/admin/v1/tenants", json={"id": "new"})
    key = client.post("/admin/v1/tenants/new/keys", json={}).json()["key"]
    assert directory.authenticate(key)
    client.delete("/admin/v1/tenants/new")
    client.post("/admin/v1/tenants", json={"id": "new"})
    assert directory.get("new") is not None and directory.authenticate(key) is None
    client.delete("/admin/v1/tenants/alpha")
    client.post("/admin/v1/tenants", json={"id": "alpha"})
    assert directory.authenticate("eh_alpha_config") is None
    directory.update([CONFIG])  # the config is read again
    assert directory.authenticate("eh_alpha_config") is None


def test_a_tenant_has_what_its_tier_says_and_what_it_says_itself(client: TestClient, admin: Admin) -> None:
    gold = Tier(weight=4.0, kv_share=0.5, limits=Limits(requests_per_minute=60, max_concurrent_requests=8))
    admin._directory.update([CONFIG], {"gold": gold})
    body = {"id": "new", "tier": "gold", "weight": 1.0, "limits": {"requests_per_minute": 5}}
    made = client.post("/admin/v1/tenants", json=body).json()
    assert (made["tier"], made["weight"], made["kv_share"]) == ("gold", 1.0, 0.5)
    assert (made["limits"]["requests_per_minute"], made["limits"]["max_concurrent_requests"]) == (5, 8)
    entry = client.get("/admin/v1/audit").json()["data"][0]
    assert entry["after"] == body, "on record is what was said"
    changed = client.patch("/admin/v1/tenants/new", json={"weight": None, "kv_share": 0.25}).json()
    assert (changed["weight"], changed["kv_share"]) == (4.0, 0.25)
    assert changed["limits"]["requests_per_minute"] == 5
    assert "no tier 'silver'; allowed: gold" in error(
        client.patch("/admin/v1/tenants/new", json={"tier": "silver"}), 400
    )
    assert "kv_share" in error(client.patch("/admin/v1/tenants/new", json={"kv_share": 0}), 400)
    admin._directory.update([CONFIG], {"gold": Tier(weight=8.0)})  # the config is read again
    assert client.get("/admin/v1/tenants/new").json()["weight"] == 8.0
    key = client.post("/admin/v1/tenants/new/keys", json={}).json()["key"]
    admin._directory.update([CONFIG], {})
    assert admin._directory.authenticate(key) is None, "its limits are not known"
    assert "no tier 'gold'" in client.get("/admin/v1/tenants/new").json()["unusable"]
    assert client.patch("/admin/v1/tenants/new", json={"tier": None}).status_code == 200
    assert admin._directory.authenticate(key) is not None


def test_a_demo_tenant_can_be_changed_and_stays_one(client: TestClient, admin: Admin) -> None:
    admin._directory.update([CONFIG.model_copy(update={"demo": True})])
    assert client.patch("/admin/v1/tenants/alpha", json={"weight": 2.0}).json()["demo"] is True
    error(client.patch("/admin/v1/tenants/alpha", json={"demo": False}), 400)
    error(client.post("/admin/v1/tenants", json={"id": "b", "demo": True}), 400)


@pytest.mark.parametrize("kind", ["tenants", "keys"])
def test_a_change_made_while_a_body_arrives_is_not_lost(
    client: TestClient, admin: Admin, redis_url: str, kind: str
) -> None:
    client.post("/admin/v1/tenants", json={"id": "new"})
    key = client.post("/admin/v1/tenants/new/keys", json={}).json()["id"]
    id = {"tenants": "new", "keys": key}[kind]
    limits = Limits(requests_per_minute=7)

    def slowly() -> Iterator[bytes]:
        yield b'{"name": '
        # What another gateway writes, and this one hears of, in the meantime.
        tenants, keys = admin._directory.managed()
        change = {id: {**tenants, **keys}[id].model_copy(update={"limits": limits})}
        with redis.Redis.from_url(redis_url) as other:
            other.hset(f"eh:v2:{{+directory}}:{kind}", id, change[id].model_dump_json(exclude_unset=True))
        admin._directory.merge_managed(*((change, {}) if kind == "tenants" else ({}, change)))
        yield b'"mine"}'

    assert client.patch(f"/admin/v1/{kind}/{id}", content=slowly()).status_code == 200
    shown = client.get(f"/admin/v1/{kind}/{id}").json()
    assert (shown["name"], shown["limits"]["requests_per_minute"]) == ("mine", 7)


def test_a_key_is_not_made_for_a_tenant_that_is_deleted_at_this_moment(
    client: TestClient, admin: Admin
) -> None:
    client.post("/admin/v1/tenants", json={"id": "new"})
    seen = admin._directory.managed_tenant("new")
    client.delete("/admin/v1/tenants/new")
    # Another gateway, which has not heard of it yet.
    admin._directory.merge_managed({"new": seen}, {})
    assert "somebody else" in error(client.post("/admin/v1/tenants/new/keys", json={}), 409)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/tenants", {"id": "alpha"}, 409, "exists already"),
        ("POST", "/tenants", {"id": "A"}, 400, "id"),
        ("POST", "/tenants", {}, 400, "id"),
        ("POST", "/tenants", {"id": "b", "wieght": 1}, 400, "did you mean weight"),
        ("POST", "/tenants", {"id": "b", "api_keys": ["eh_b_x"]}, 400, "create keys instead"),
        ("POST", "/tenants", {"id": "b", "model_limits": {"x": {}}}, 400, "'x' is not a model id"),
        ("POST", "/tenants", {"id": "b", "models": ["x"]}, 400, "'x' is not a model id"),
        ("POST", "/tenants", {"id": "b", "generation": 3}, 400, "generation cannot be set here"),
        ("PATCH", "/tenants/alpha", {"generation": 1}, 400, "generation cannot be set here"),
        ("PATCH", "/tenants/alpha", {"id": "b"}, 400, "cannot be changed"),
        ("PATCH", "/tenants/nobody", {}, 404, "no tenant 'nobody'"),
        ("POST", "/tenants/alpha/keys", {"models": ["x"]}, 400, "'x' is not a model id"),
        ("POST", "/tenants/alpha/keys", {"models": ["n"]}, 400, "may not use 'n'"),
        ("POST", "/tenants/alpha/keys", {"routes": ["/admin"]}, 400, "is not a route"),
        ("POST", "/tenants/alpha/keys", {"expires_in_s": 0}, 400, "expires_in_s"),
        ("POST", "/tenants/alpha/keys", {"expires_in_s": 10**30}, 400, "expires_in_s"),
        ("POST", "/tenants/alpha/keys", [], 400, "JSON object"),
        ("POST", "/keys/0123456789ab/rotate", {}, 404, "no key"),
        ("GET", "/audit?limit=0", None, 400, "1 to 1000"),
        ("GET", "/audit?before=99999999999999999999-1", None, 400, "the id of an entry"),
        ("PUT", "/tenants", {}, 405, "does not take"),
    ],
)
def test_mistakes_are_named(
    client: TestClient, method: str, path: str, body: Any, status: int, message: str
) -> None:
    assert message in error(client.request(method, f"/admin/v1{path}", json=body), status)
    assert client.get("/admin/v1/audit").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"id": "b", "id": "c"}', "id"),
        (b'{"id": "b", "weight": NaN}', "weight"),
        (b'{"id": "b", "name": "a\\u0000"}', "name"),
        (b'{"id": "b", "name": "\\ud800"}', "name"),
        (b'{"id": "b", "limits": {"requests_per_minute": 0}}', "limits.requests_per_minute"),
        (b'{"id": "b", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "x"),
        (b"\xff", None),
    ],
)
def test_f16_bodies_are_read_as_strictly_as_those_of_tenants(
    client: TestClient, body: bytes, param: str | None
) -> None:
    answer = client.post("/admin/v1/tenants", content=body)
    error(answer, 400)
    assert answer.json()["error"]["param"] == param


def test_d01_a_later_tenant_with_the_id_of_one_that_was_deleted_is_another(
    client: TestClient, admin: Admin
) -> None:
    """It has neither the cached prefixes nor the kept answers of the one before."""
    directory, seen = admin._directory, set()
    for _ in range(3):
        assert client.post("/admin/v1/tenants", json={"id": "new"}).status_code == 201
        assert client.patch("/admin/v1/tenants/new", json={"weight": 2.0}).status_code == 200
        tenant = directory.get("new")
        assert tenant is not None
        seen |= {directory.cache_namespace(tenant), directory.request_digest(tenant, b"x")}
        client.delete("/admin/v1/tenants/new")
    assert len(seen) == 6


def test_the_command_line_speaks_to_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = client.request(method, f"/admin/v1{path}", json=body)
        if answer.status_code >= 400:
            admin_cli._fail(answer.json()["error"]["message"])
        return answer.json()

    monkeypatch.setattr(admin_cli, "_call", call)

    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.output.splitlines()]

    [tenant] = run("tenants", "create", "team", "--set", "weight=2", "--set", 'limits={"tokens_per_day": 5}')
    assert tenant["weight"] == 2 and tenant["limits"]["tokens_per_day"] == 5
    [made] = run("keys", "create", "team", "--set", "name=ci", "--set", 'models=["m"]')
    assert made["key"].startswith("eh_") and made["name"] == "ci"
    [rotated] = run("keys", "rotate", made["id"], "--overlap-s", "0")
    [revoked] = run("keys", "revoke", rotated["id"])
    assert revoked["revoked"]
    [tenant] = run("tenants", "update", "team", "--set", "enabled=false")
    assert not tenant["enabled"] and [t["id"] for t in run("tenants", "list")] == ["alpha", "team"]
    assert len(run("keys", "list", "team")) == 2 and run("tenants", "show", "team")[0]["id"] == "team"
    run("tenants", "delete", "team")
    assert run("audit", "--limit", "1")[0]["action"] == "delete"
    failed = CliRunner().invoke(cli, ["tenants", "show", "team"])
    assert failed.exit_code == 1 and "no tenant 'team'" in failed.output


def test_the_command_line_needs_a_key_and_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(admin_cli.KEY_VARIABLE, raising=False)
    done = CliRunner().invoke(cli, ["tenants", "list"])
    assert done.exit_code == 1 and "set EVENHAND_ADMIN_KEY" in done.output
    monkeypatch.setenv(admin_cli.KEY_VARIABLE, KEY)
    done = CliRunner().invoke(cli, ["tenants", "list", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 1 and "error: http://127.0.0.1:1: " in done.output and KEY not in done.output
