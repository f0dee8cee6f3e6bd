"""Keys, tenants, the server secret: who a key belongs to, and that nothing shows a key."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tenancy.directory import TenantDirectory
from tenancy.keys import MAX_KEY_CHARS, KeyHasher
from tenancy.models import Tenant, check_unambiguous
from tenancy.secret_file import load_or_create_secret

SECRET = b"s" * 32
MARKER = "MARKERsecretMARKER"


def make(id: str, *keys: str, **fields: Any) -> Tenant:
    return Tenant.model_validate({"id": id, "api_keys": list(keys), **fields})


def test_a_key_names_its_tenant() -> None:
    directory = TenantDirectory(
        [make("alpha", "eh_alpha_one", "eh_alpha_two"), make("beta", "eh_beta_x")], SECRET
    )
    for key, owner in (("eh_alpha_one", "alpha"), ("eh_alpha_two", "alpha"), ("eh_beta_x", "beta")):
        found = directory.authenticate(key)
        assert found is not None and found.tenant.id == owner and found.tenant.api_keys == ()
    assert directory.get("beta") is not None and directory.get("nobody") is None


def test_f01_every_key_takes_the_same_bounded_path(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "eh_alpha_" + "k" * (MAX_KEY_CHARS - 9)
    disabled = make("gamma", "eh_gamma_off", enabled=False)
    directory = TenantDirectory([make("alpha", "eh_alpha_one", longest), disabled], SECRET)
    seen: list[int] = []
    original = KeyHasher._hash

    def spy(self: KeyHasher, text: str, use: bytes, size: int) -> bytes:
        seen.append(len(text))
        return original(self, text, use, size)

    monkeypatch.setattr(KeyHasher, "_hash", spy)
    assert directory.authenticate("eh_alpha_one") is not None
    assert directory.authenticate(longest) is not None
    wrong = [
        "",
        "eh_alpha_on",
        "eh_alpha_one ",
        "eh_gamma_off",
        "sk-foreign",
        "\x00",
        "schlüssel\u20ac",
        "\udc80",
        "é",
    ]
    wrong += [longest + "k", longest + "k" * 1_000_000]
    for key in wrong:
        assert directory.authenticate(key) is None
    assert len(seen) == 2 + len(wrong), "one hash per call, whatever the key"
    assert max(seen) == MAX_KEY_CHARS + 1, "the cost of an over-long key is bounded"


def test_f19_update_swaps_at_once_or_not_at_all() -> None:
    directory = TenantDirectory([make("alpha", "eh_alpha_old")], SECRET)
    directory.update([make("alpha", "eh_alpha_new"), make("beta", "eh_beta_x")])
    assert directory.authenticate("eh_alpha_old") is None
    assert directory.authenticate("eh_alpha_new") is not None
    with pytest.raises(ValueError, match="id 'alpha'"):
        directory.update([make("alpha"), make("alpha")])
    assert directory.authenticate("eh_beta_x") is not None


def test_ambiguous_tenants_are_refused_without_naming_a_key() -> None:
    with pytest.raises(ValueError, match="two tenants have the id 'alpha'"):
        check_unambiguous([make("alpha"), make("alpha")])
    shared = f"eh_alpha_{MARKER}"
    with pytest.raises(
        ValueError, match=r"api_keys\[1\] of tenant 'beta' is also a key of tenant 'alpha'"
    ) as error:
        TenantDirectory([make("alpha", shared), make("beta", "eh_beta_x", shared)], SECRET)
    assert MARKER not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"id": "Alpha"}, "id"),
        ({"id": "a" * 65}, "id"),
        ({"id": "-a"}, "id"),
        ({"id": "a\n"}, "id"),
        ({"id": "a{b}"}, "id"),
        ({"weight": 0}, "weight"),
        ({"weight": 1e-6}, "weight"),
        ({"weight": 1e9}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"weight": "1"}, "weight"),
        ({"colour": "red"}, "colour"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"requests_burst": 5}}, "limits"),
        ({"limits": {"tokens": 5}}, "limits.tokens"),
        ({"api_keys": ["sk-" + MARKER]}, "api_keys"),
        ({"api_keys": ["eh_alpha_" + MARKER + "é"]}, "api_keys"),
        ({"api_keys": ["eh_alpha_" + MARKER * 20]}, "api_keys"),
        ({"api_keys": [["eh_alpha_" + MARKER]]}, "api_keys.0"),
    ],
)
def test_bad_configs_are_refused_by_name_and_keep_keys_to_themselves(
    fields: dict[str, Any], where: str
) -> None:
    with pytest.raises(ValidationError) as error:
        Tenant.model_validate({"id": "alpha", **fields})
    assert [".".join(map(str, detail["loc"])) for detail in error.value.errors()] == [where]
    assert MARKER not in str(error.value)


def test_the_config_shape_of_the_demo_tenants() -> None:
    tenant = Tenant.model_validate(
        {
            "id": "alpha",
            "weight": 1.0,
            "api_keys": ["eh_alpha_demo"],
            "limits": {"requests_per_minute": 6000, "max_concurrent_requests": 256},
            "models": None,
            "demo": True,
        }
    )
    assert tenant.may_use("anything") and tenant.demo
    only = make("beta", models=["a", "b"])
    assert only.may_use("b") and not only.may_use("c")


def test_f05_no_key_in_any_repr() -> None:
    key = f"eh_alpha_{MARKER}"
    tenant = make("alpha", key)
    directory = TenantDirectory([tenant], SECRET)
    found = directory.authenticate(key)
    hasher = KeyHasher(SECRET)
    for thing in (
        tenant,
        found,
        directory,
        directory._snapshot,
        hasher,
        tenant.model_dump(),
        found.tenant.model_dump_json(),
    ):
        assert MARKER not in repr(thing) + str(thing)
        assert "ssss" not in repr(thing)
    fingerprint = directory.fingerprint(key)
    assert len(fingerprint) == 8 and fingerprint != hasher.digest(key).hex()[:8]


def test_digests_and_salts_need_the_secret_and_differ_by_use() -> None:
    one, other = KeyHasher(b"1" * 32), KeyHasher(b"2" * 32)
    assert one.digest("alpha") != other.digest("alpha")
    assert one.cache_salt("alpha") != other.cache_salt("alpha")
    assert one.cache_salt("alpha") != one.cache_salt("beta")
    assert one.cache_salt("alpha") == KeyHasher(b"1" * 32).cache_salt("alpha")
    assert not one.digest("alpha").hex().startswith(one.cache_salt("alpha"))
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        KeyHasher(b"short")


def test_d01_a_prefix_cache_is_shared_by_choice_alone() -> None:
    directory = TenantDirectory([], SECRET)
    closed = [directory.cache_namespace(Tenant(id=name)) for name in ("alpha", "beta")]
    shared = [
        directory.cache_namespace(Tenant(id=name, shared_prefix_cache=True)) for name in ("alpha", "beta")
    ]
    assert len({*closed, *shared}) == 3 and shared[0] == shared[1]


def test_processes_that_start_together_share_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    with ThreadPoolExecutor(16) as pool:
        secrets = set(pool.map(lambda _: load_or_create_secret(path), range(64)))
    assert len(secrets) == 1 and len(secrets.pop()) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_a_secret_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("guessme\n")
    with pytest.raises(ValueError, match="at least 32 characters"):
        load_or_create_secret(tmp_path / "secret")
