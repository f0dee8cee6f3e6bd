"""The config file: what is accepted, and the one line that each mistake is answered with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policies.fair_queue import QUEUE_POLICIES
from serve_app.config_errors import ConfigError
from serve_app.config_file import check_document, load_config, require_sources
from serve_app.engine import engine_options
from serve_app.exposure import demo_key, is_loopback
from serve_app.settings import (
    REDIS_URL_VARIABLE,
    ModelSettings,
    SchedulerSettings,
    parse_args,
    parse_user_config,
)

SHIPPED = Path(__file__).parents[2] / "config.yaml"
ARGS = "config.yaml: applications[0].args"


@pytest.fixture(autouse=True)
def no_redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REDIS_URL_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    return load_config(SHIPPED).document


def args_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["applications"][0]["args"]


def model_of(document: dict[str, Any]) -> dict[str, Any]:
    return args_of(document)["models"][0]


def gateway_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["applications"][0]["deployments"][0]


def test_shipped_config_has_the_demo_tenants_on_loopback() -> None:
    config = load_config(SHIPPED)
    limits = {tenant.id: tenant.limits for tenant in config.user_config.tenants}
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert set(limits) == {"alpha", "beta", "limited"}
    assert limits["alpha"] == limits["beta"]
    assert limits["alpha"].requests_per_minute == 6000
    assert limits["alpha"].max_concurrent_requests == 256
    assert limits["limited"].requests_per_minute == 5
    assert config.settings.models[0].scheduler.for_device("cpu").waiting_timeout_ms == 60_000
    assert demo_key(config.user_config.tenants) == "eh_alpha_demo"


MISTAKES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (
        lambda d: model_of(d).update(dtype="int3"),
        f"{ARGS}.models[0].dtype: 'int3' is not allowed; allowed: auto, float32, bfloat16, float16",
    ),
    (
        lambda d: model_of(d).update(dtpe="auto"),
        f"{ARGS}.models[0].dtpe: unknown key (did you mean dtype?); allowed: id,",
    ),
    (lambda d: model_of(d).pop("source"), f"{ARGS}.models[0].source: is missing"),
    (
        lambda d: model_of(d).update(tensor_parallel=2),
        f"{ARGS}.models[0].tensor_parallel: 2 is not allowed; allowed: 1",
    ),
    (
        lambda d: model_of(d).update(quantization="int3"),
        f"{ARGS}.models[0].quantization: 'int3' is not allowed; allowed: none, int8, int4",
    ),
    (
        lambda d: model_of(d).update(attention="flash"),
        f"{ARGS}.models[0].attention: 'flash' is not allowed; allowed: auto, flashinfer, reference",
    ),
    (
        lambda d: model_of(d).update(engines="2"),
        f"{ARGS}.models[0].engines: '2' is not allowed; allowed: an integer",
    ),
    (
        lambda d: model_of(d).update(engines=True),
        f"{ARGS}.models[0].engines: True is not allowed; allowed: an integer",
    ),
    (
        lambda d: model_of(d).update(threads=0),
        f"{ARGS}.models[0].threads: 0 is not allowed; allowed: at least 1",
    ),
    (
        lambda d: model_of(d).update(scheduler={"max_num_seqs": 2**63}),
        f"{ARGS}.models[0].scheduler.max_num_seqs: {2**63} is not allowed; allowed: at most {2**31 - 1}",
    ),
    (
        lambda d: model_of(d).update(engines=0, threads=0),
        f"{ARGS}.models[0].engines: 0 is not allowed; allowed: at least 1 (and 1 more)",
    ),
    (
        lambda d: model_of(d).update(aliases="x"),
        f"{ARGS}.models[0].aliases: 'x' is not allowed; allowed: a list",
    ),
    (
        lambda d: model_of(d).update(kv_cache=3),
        f"{ARGS}.models[0].kv_cache: 3 is not allowed; allowed: a mapping",
    ),
    (
        lambda d: model_of(d).update(kv_cache={"page_size": 32}),
        f"{ARGS}.models[0].kv_cache.page_size: 32 is not allowed; allowed: 16",
    ),
    (
        lambda d: model_of(d).update(kv_cache={"pages": 9, "memory_gb": 1.0}),
        f"{ARGS}.models[0].kv_cache: pages and memory_gb cannot both be set",
    ),
    (
        lambda d: model_of(d)["scheduler"].update(kv_cache_utilization_limit=1.5),
        f"{ARGS}.models[0].scheduler.kv_cache_utilization_limit: 1.5 is not allowed; allowed: at most 1.0",
    ),
    (
        lambda d: model_of(d)["scheduler"].update(kv_watermark=1.0),
        f"{ARGS}.models[0].scheduler.kv_watermark: 1.0 is not allowed; allowed: less than 1.0",
    ),
    (
        lambda d: model_of(d)["scheduler"].update(locality_window=-1),
        f"{ARGS}.models[0].scheduler.locality_window: -1 is not allowed; allowed: at least 0.0",
    ),
    (
        lambda d: model_of(d)["scheduler"].update(policy="lifo"),
        f"{ARGS}.models[0].scheduler.policy: 'lifo' is not allowed; allowed: vtc, fcfs, rpm, lcf, drr, dlpm",
    ),
    (
        lambda d: model_of(d).update(aliases=["smollm2-135m-instruct"]),
        f"{ARGS}.models: two models are named 'smollm2-135m-instruct'; ids and aliases must be unique",
    ),
    (
        lambda d: args_of(d).update(models=[]),
        f"{ARGS}.models: an empty list is not allowed; allowed: at least 1 item(s)",
    ),
    (
        lambda d: args_of(d)["telemetry"]["tracing"].update(exporter="file"),
        f"{ARGS}.telemetry.tracing: exporter 'file' needs a path",
    ),
    (
        lambda d: args_of(d).update(redis_url="http://user:pass@host"),
        f"{ARGS}.redis_url: the value given is not allowed; allowed: null, or redis://, rediss://, unix://",
    ),
    (
        lambda d: d["http_options"].update(hots="x"),
        "config.yaml: http_options.hots: unknown key (did you mean host?); allowed: host, port,",
    ),
    (
        lambda d: d.update(http_option={}),
        "config.yaml: http_option: unknown key (did you mean http_options?); allowed: proxy_location,",
    ),
    (
        lambda d: gateway_of(d).update(ray_actor_options={"num_cpu": 1}),
        "config.yaml: applications[0].deployments[0].ray_actor_options.num_cpu: "
        "unknown key (did you mean num_cpus?); allowed: runtime_env,",
    ),
    (
        lambda d: gateway_of(d).update(num_replicas=-1),
        "config.yaml: applications[0].deployments[0].num_replicas: -1 is not allowed; allowed: more than 0",
    ),
    (
        lambda d: d.update(proxy_location="Moon"),
        "config.yaml: proxy_location: 'Moon' is not allowed; allowed: Disabled, HeadOnly, EveryNode",
    ),
    (
        lambda d: d["http_options"].update(port=0),
        "config.yaml: http_options.port: 0 is not allowed; allowed: 1 to 65535",
    ),
    (
        lambda d: d["http_options"].update(keep_alive_timeout_s=-1),
        "config.yaml: http_options.keep_alive_timeout_s: -1 is not allowed; allowed: more than 0",
    ),
    (
        lambda d: gateway_of(d)["user_config"]["tenants"][0].update(api_keys=[]),
        "config.yaml: applications[0].deployments[0].user_config.tenants: tenant 'alpha': api_keys is empty",
    ),
    (
        lambda d: args_of(d)["gateway"].update(cors_origins=["*"]),
        f"{ARGS}.gateway.cors_origins[0]: '*' is not allowed; allowed: a string that matches",
    ),
    (lambda d: d.pop("applications"), "config.yaml: applications: is missing"),
    (
        lambda d: d["applications"][0].update(import_path="other:app"),
        "config.yaml: applications: 0 with import_path serve_app.app:build; allowed: exactly one",
    ),
    (
        lambda d: gateway_of(d).update(name="Engine"),
        "config.yaml: applications[0].deployments[0].user_config: only Gateway takes a user_config",
    ),
    (
        lambda d: gateway_of(d)["user_config"]["tenants"][0].update(wieght=2.0),
        "config.yaml: applications[0].deployments[0].user_config.tenants[0].wieght: "
        "unknown key (did you mean weight?); allowed: id,",
    ),
    (
        lambda d: gateway_of(d)["user_config"]["tenants"][1].update(id="alpha"),
        "config.yaml: applications[0].deployments[0].user_config.tenants: two tenants have the id 'alpha'",
    ),
    (
        lambda d: d["http_options"].update(host="0.0.0.0"),
        "config.yaml: http_options.host: '0.0.0.0' is not allowed while a tenant has a demo key; "
        "allowed: 127.0.0.1, ::1, localhost",
    ),
    (
        # Ray's own default is every interface.
        lambda d: d["http_options"].pop("host"),
        "config.yaml: http_options.host: '0.0.0.0' is not allowed while a tenant has a demo key",
    ),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    shipped: dict[str, Any], change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    document = copy.deepcopy(shipped)
    change(document)
    with pytest.raises(ConfigError) as caught:
        check_document(document, "config.yaml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_no_secret_in_a_message(shipped: dict[str, Any]) -> None:
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda d: model_of(d).update(token=["hush"]),
        lambda d: args_of(d).update(redis_url="http://:hush@host"),
        lambda d: gateway_of(d)["user_config"].update(metrics_key="hush"),
        lambda d: gateway_of(d)["user_config"]["tenants"][0].update(api_keys=["hush"]),
        lambda d: gateway_of(d)["user_config"]["tenants"][0].update(api_keys="eh_hush_hush"),
        lambda d: gateway_of(d)["user_config"].update(tenants={"api_keys": "hush"}),
        lambda d: gateway_of(d)["user_config"].update(tenants=["eh_hush_hush"]),
    ]
    for change in changes:
        document = copy.deepcopy(shipped)
        change(document)
        with pytest.raises(ConfigError) as caught:
            check_document(document, "config.yaml")
        assert "hush" not in str(caught.value)


def test_demo_keys_are_known_with_and_without_the_mark(shipped: dict[str, Any]) -> None:
    document = copy.deepcopy(shipped)
    document["http_options"]["host"] = "0.0.0.0"
    tenants = gateway_of(document)["user_config"]["tenants"]
    for tenant in tenants:
        tenant["demo"] = False
    with pytest.raises(ConfigError, match="demo key"):
        check_document(document, "config.yaml")
    for tenant in tenants:
        tenant["api_keys"] = [f"eh_{tenant['id']}_8d1fa02c"]
    assert check_document(document, "config.yaml").host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", ":1: not valid YAML: "),
        (
            "applications: []\nhttp_options: {}\napplications: []\n",
            ":3: not valid YAML: key 'applications' is given twice",
        ),
        ("a:\n  b: 1\n  b: 2\n", ":3: not valid YAML: key 'b' is given twice"),
        ("- one\n", ": the file must hold a mapping; allowed keys: proxy_location,"),
        ("", ": the file must hold a mapping"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such file"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "bytes.yaml")


def test_merge_keys_are_not_duplicates(tmp_path: Path) -> None:
    text = SHIPPED.read_text().replace(
        "  port: 8000", "  port: 8000\n  <<: {keep_alive_timeout_s: 7}\n  root_path: /v"
    )
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("  keep_alive_timeout_s: 300\n", ""))
    assert load_config(path).document["http_options"]["keep_alive_timeout_s"] == 7


def test_overrides_reach_every_model_and_are_checked(shipped: dict[str, Any]) -> None:
    document = copy.deepcopy(shipped)
    args_of(document)["models"].append({"id": "second", "source": "somewhere"})
    config = check_document(document, "config.yaml")
    changed = config.override(port=9000, engine="stub", policy="fcfs", data_dir="/data")
    assert [m.engine for m in changed.settings.models] == ["stub", "stub"]
    assert [m.scheduler.policy for m in changed.settings.models] == ["fcfs", "fcfs"]
    assert changed.settings.models[0].scheduler.max_num_seqs == 32
    assert changed.port == 9000
    assert changed.settings.data_path(9000) == Path("/data")
    assert config.settings.models[0].engine == "auto"  # the first one is as it was
    with pytest.raises(
        ConfigError, match=r"models\[0\]\.engine: 'fast' is not allowed; allowed: auto, native, torch, stub"
    ):
        config.override(engine="fast")
    with pytest.raises(ConfigError, match="demo key"):
        config.override(host="0.0.0.0")


def test_instances_on_two_ports_have_two_data_directories(shipped: dict[str, Any]) -> None:
    settings = check_document(shipped, "config.yaml").settings
    assert settings.data_path(8000) != settings.data_path(8001)
    assert settings.data_path(8000).is_absolute()


def test_redis_url_from_the_environment_stands_in_for_null(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"models": [{"id": "m", "source": "s"}]}
    assert parse_args(args).redis_url is None
    monkeypatch.setenv(REDIS_URL_VARIABLE, "redis://:hush@127.0.0.1:7000/0")
    settings = parse_args(args)
    assert settings.redis_url == "redis://:hush@127.0.0.1:7000/0"
    assert "hush" not in repr(settings)
    assert parse_args({**args, "redis_url": "redis://other"}).redis_url == "redis://other"
    monkeypatch.setenv(REDIS_URL_VARIABLE, "7000")
    with pytest.raises(ConfigError, match=f"environment: {REDIS_URL_VARIABLE}"):
        parse_args(args)


@pytest.mark.parametrize("source", ["package:no_such_package", "/no/such/model", "./missing.gguf", "~/none"])
def test_a_source_that_is_not_on_this_machine(shipped: dict[str, Any], source: str) -> None:
    document = copy.deepcopy(shipped)
    model_of(document).update(source=source)
    config = check_document(document, "config.yaml")
    with pytest.raises(ConfigError, match=r"^config\.yaml: models\[0\]\.source: "):
        require_sources(config)
    require_sources(config.override(engine="stub"))


def test_sources_that_may_be_on_a_hub_are_left_alone(shipped: dict[str, Any]) -> None:
    document = copy.deepcopy(shipped)
    model_of(document).update(source="org/no-such-model")
    require_sources(check_document(document, "config.yaml"))
    require_sources(check_document(shipped, "config.yaml"))


def test_proxies_are_addresses_or_networks() -> None:
    args: dict[str, Any] = {"models": [{"id": "m", "source": "s"}], "gateway": {}}
    for proxies in (["10.0.0.0/8", "::1", "192.0.2.7"], []):
        args["gateway"]["trusted_proxies"] = proxies
        assert parse_args(args).gateway.trusted_proxies == proxies
    for wrong in ("10.0.0.1/8", "balancer.example"):
        args["gateway"]["trusted_proxies"] = [wrong]
        with pytest.raises(ConfigError, match=r"trusted_proxies: .*; allowed: addresses and networks"):
            parse_args(args)


def test_parts_parse_by_themselves() -> None:
    assert parse_user_config({}).tenants == []
    with pytest.raises(ConfigError, match=r"user_config\.tenant: unknown key \(did you mean tenants\?\)"):
        parse_user_config({"tenant": []})
    with pytest.raises(ConfigError, match=r"args\.models: is missing"):
        parse_args({})


@pytest.mark.parametrize(
    ("device", "seqs", "tokens", "timeout"), [("cpu", 32, 64, 60_000), ("cuda", 256, 2048, 30_000)]
)
def test_scheduler_defaults_by_device(device: Any, seqs: int, tokens: int, timeout: int) -> None:
    limits = SchedulerSettings().for_device(device)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.waiting_timeout_ms) == (
        seqs,
        tokens,
        timeout,
    )
    assert limits.prefill_chunk_size == tokens
    assert limits.max_model_len is None
    # A chunk is never larger than the step it has to fit into.
    assert (
        SchedulerSettings(prefill_chunk_size=500, max_num_batched_tokens=64)
        .for_device(device)
        .prefill_chunk_size
        == 64
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("box", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prices": {"gpt-4": {"input": 1.0}}}, "prices: 'gpt-4' is not a model id; allowed: smollm2"),
        (
            {"tenants": [{"id": "a", "model_limits": {"x": {}}}]},
            "model_limits of tenant 'a': 'x' is not a model id",
        ),
        ({"tenants": [{"id": "a", "models": ["x"]}]}, "models of tenant 'a': 'x' is not a model id"),
        (
            {"tenants": [{"id": "a", "limits": {"cost_per_day": 1.5}}]},
            "tenant 'a' has a budget in cost, and prices has no 'smollm2",
        ),
        (
            {"tenants": [{"id": "a", "limits": {"tokens_per_day": 9, "on_outage": "local_share"}}]},
            "on_outage of tokens_per_day cannot be local_share; allowed: closed, open",
        ),
        (
            {"tenants": [{"id": "a", "tier": "gold"}]},
            "tenant 'a': there is no tier 'gold'; the config has no",
        ),
        ({"tiers": {"gold": {"wieght": 2}}}, "tiers.gold.wieght: unknown key (did you mean weight?)"),
        (
            {"tiers": {"gold": {"kv_share": 1.5}}},
            "tiers.gold.kv_share: 1.5 is not allowed; allowed: at most 1",
        ),
        (
            {"tiers": {"gold": {"model_limits": {"x": {}}}}},
            "model_limits of tier 'gold': 'x' is not a model id",
        ),
        (
            {"tiers": {"gold": {"limits": {"cost_per_day": 1.5}}}},
            "tier 'gold' has a budget in cost, and prices has no 'smollm2",
        ),
    ],
)
def test_prices_and_limits_fit_the_models(
    shipped: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    document = copy.deepcopy(shipped)
    gateway_of(document)["user_config"].update(change)
    with pytest.raises(ConfigError) as error:
        check_document(document, "config.yaml")
    assert message in str(error.value)


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_policy_window_and_habits_reach_queue_and_engine(policy: Any) -> None:
    scheduler = {
        "policy": policy,
        "locality_window": 512.0,
        "request_level_batching": True,
        "prefill_first": True,
    }
    model = ModelSettings.model_validate({"id": "m", "source": "package:p", "scheduler": scheduler})
    limits = model.scheduler.for_device("cpu")
    assert (limits.policy, limits.locality_window) == (policy, 512.0)
    options = engine_options(model, "cpu")
    assert options.request_level_batching and options.prefill_first
