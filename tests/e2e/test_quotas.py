"""What a tenant is charged, as headers, counters, ledger and the usage sent tell it, on the real system."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest
import redis

from tenancy.ledger import LedgerFiles

pytestmark = pytest.mark.e2e

ADMIN_KEY = "eh_admin_key_for_these_tests"
FAILED_LOGINS = 50
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(start_server: Any) -> Any:
    """A stub server with tenants that have every kind of limit."""

    def tenants(config: dict[str, Any]) -> None:
        user_config = config["applications"][0]["deployments"][0]["user_config"]
        model = config["applications"][0]["args"]["models"][0]["id"]
        user_config["admin"] = {"keys": {"ops": ADMIN_KEY}}
        config["applications"][0]["args"]["gateway"] |= {
            "max_failed_logins_per_minute": FAILED_LOGINS,
            "trusted_proxies": ["127.0.0.9"],
        }
        user_config["prices"] = {model: {"input": 1.0, "output": 2.0}}
        user_config["tenants"] += [
            {
                "id": "paying",
                "api_keys": ["eh_paying_test"],
                "limits": {"tokens_per_minute": 100_000, "tokens_per_day": 1_000_000, "cost_per_month": 5},
            },
            {"id": "poor", "api_keys": ["eh_poor_test"], "limits": {"tokens_per_day": 60}},
            {
                "id": "short",
                "api_keys": ["eh_short_test"],
                "limits": {"max_input_tokens": 60, "max_output_tokens": 7},
            },
        ]

    with start_server("--engine", "stub", change=tenants) as server:
        yield server


def counters(server: Any, tenant: str) -> dict[str, int]:
    settings = server.redis_settings()
    with redis.Redis(port=int(settings["port"]), password=settings["requirepass"]) as client:
        found = client.hgetall(f"eh:v2:{{{tenant}}}:usage")
    return {k.decode().split("|")[2]: int(v) for k, v in found.items() if k.count(b"|") == 2}


def test_e04_what_is_charged_is_what_was_used(server: Any) -> None:
    """Whole, streamed, of several choices, and cancelled in the middle: counters and the usage sent agree."""
    prompt = output = 0
    with server.openai("paying") as client:
        raw = client.chat.completions.with_raw_response.create(
            model=server.model, messages=MESSAGES, max_tokens=20
        )
        assert raw.headers["x-ratelimit-limit-tokens"] == "100000"
        assert 99_000 < int(raw.headers["x-ratelimit-remaining-tokens"]) < 100_000
        whole = raw.parse().usage
        several = client.chat.completions.create(
            model=server.model, messages=MESSAGES, max_tokens=10, n=3
        ).usage
        *_, last = client.chat.completions.create(
            model=server.model,
            messages=MESSAGES,
            max_tokens=15,
            stream=True,
            stream_options={"include_usage": True},
        )
        for usage in (whole, several, last.usage):
            prompt += usage.prompt_tokens
            output += usage.completion_tokens
        server.wait_until(lambda: counters(server, "paying").get("requests") == 3, 5)
        found = counters(server, "paying")
        assert (found["input"], found["output"]) == (prompt, output)
        assert found["price"] == 1000 * (prompt + 2 * output)

        stream = client.chat.completions.create(
            model=server.model, messages=MESSAGES, max_tokens=4000, stream=True
        )
        seen = 0
        for chunk in stream:
            seen += bool(chunk.choices and chunk.choices[0].delta.content)
            if seen == 5:
                break
        stream.close()
    server.wait_until(lambda: counters(server, "paying").get("requests") == 4, 10)
    found = counters(server, "paying")
    assert found["input"] == prompt + whole.prompt_tokens
    assert 5 <= found["output"] - output < 1000, "what was generated, not what was asked for"
    for kind, total in (("input", found["input"]), ("output", found["output"])):
        assert server.metric("billed_tokens_total", tenant="paying", kind=kind) == total
    [line] = httpx.get(
        f"{server.base_url}/v1/usage", headers=server.headers("paying"), trust_env=False
    ).json()["data"]
    assert (line["requests"], line["input_tokens"], line["output_tokens"], line["cost"]) == (
        4, found["input"], found["output"], found["price"] / 1e9,
    )  # fmt: skip
    files = LedgerFiles(server.data_dir / "ledger")
    server.wait_until(lambda: len(list(files.read(tenant="paying"))) == 4, 10)
    rows = list(files.read(tenant="paying"))
    for column, name in (("input_tokens", "input"), ("output_tokens", "output"), ("price_nano", "price")):
        assert sum(row[column] for row in rows) == found[name]
    assert [row["outcome"] for row in rows] == ["ok", "ok", "ok", "cancelled"]


def test_a_budget_ends_and_says_so(server: Any) -> None:
    with server.openai("poor", max_retries=2) as client:
        used = 0
        with pytest.raises(openai.RateLimitError) as refused:
            for _ in range(40):
                answer = client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=4)
                used += answer.usage.total_tokens
    assert 0 < used <= 60
    response = refused.value.response
    assert (refused.value.code, refused.value.type) == ("budget_exceeded", "insufficient_quota")
    assert response.headers["x-should-retry"] == "false"
    assert "60 tokens per day" in refused.value.message


def test_lengths_of_a_tenant(server: Any) -> None:
    def post(**body: Any) -> httpx.Response:
        with server.http("short") as client:
            return client.post("/v1/chat/completions", json={"model": server.model, **body})

    answer = post(messages=MESSAGES)
    assert answer.json()["usage"]["completion_tokens"] == 7, answer.text
    answer = post(messages=MESSAGES, max_tokens=8)
    assert answer.status_code == 400 and "at most 7 tokens" in answer.json()["error"]["message"]
    answer = post(messages=[{"role": "user", "content": "Hello " * 60}])
    assert answer.status_code == 400 and "at most 60 tokens" in answer.json()["error"]["message"]
    assert json.loads(answer.text)["error"]["code"] == "invalid_request"


def test_f19_a_key_made_and_revoked_by_the_command_line(server: Any) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        environment = {**os.environ, "EVENHAND_ADMIN_KEY": ADMIN_KEY, "EVENHAND_URL": server.base_url}
        command = [sys.executable, "-m", "serve_app.cli", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def ask(key: str, path: str = "/v1/completions") -> int:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": server.model, "prompt": "Hello", "max_tokens": 1}
        return httpx.post(f"{server.base_url}{path}", json=body, headers=headers, trust_env=False).status_code

    run("tenants", "create", "team", "--set", 'limits={"requests_per_minute": 100}')
    made = run("keys", "create", "team", "--set", 'routes=["/v1/completions"]')
    key = made["key"]
    server.wait_until(lambda: ask(key) == 200, 5)
    assert ask(key, "/v1/chat/completions") == 403
    assert ask(key, "/admin/v1/tenants") == 401
    assert ask(ADMIN_KEY) == 401
    run("keys", "revoke", made["id"])
    server.wait_until(lambda: ask(key) == 401, 5)
    for text in (server.log(), json.dumps(server.access_log()), json.dumps(server.spans())):
        assert key not in text and ADMIN_KEY not in text


def test_a_disabled_tenant_is_refused_and_its_streams_run_to_their_end(server: Any) -> None:
    admin = httpx.Client(
        base_url=f"{server.base_url}/admin/v1",
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        trust_env=False,
    )
    with admin:
        assert admin.post("/tenants", json={"id": "leaving"}).status_code == 201
        key = admin.post("/tenants/leaving/keys", json={}).json()
        request = {"model": server.model, "messages": MESSAGES}
        with server.openai("alpha", api_key=key["key"]) as client:
            stream = client.chat.completions.create(
                max_tokens=600, stream=True, stream_options={"include_usage": True}, **request
            )
            next(iter(stream))
            newer = admin.post(f"/keys/{key['id']}/rotate", json={"overlap_s": 0}).json()["key"]
            with pytest.raises(openai.AuthenticationError):
                client.chat.completions.create(max_tokens=1, **request)
            with server.openai("alpha", api_key=newer) as rotated:
                rotated.chat.completions.create(max_tokens=1, **request)
                assert admin.patch("/tenants/leaving", json={"enabled": False}).status_code == 200
                with pytest.raises(openai.AuthenticationError):
                    rotated.chat.completions.create(max_tokens=1, **request)
            *_, last = stream
        assert last.usage.completion_tokens > 0
        server.wait_until(lambda: counters(server, "leaving").get("requests") == 2, 5)
        assert admin.delete("/tenants/leaving").status_code == 200
        assert counters(server, "leaving")["output"] == last.usage.completion_tokens + 1


def test_e13_failed_logins_are_bounded_per_source(server: Any) -> None:
    def ask(source: str, key: str, path: str = "/v1/models", forwarded: str = "") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", **({"X-Forwarded-For": forwarded} if forwarded else {})}
        return clients[source].get(f"{server.base_url}{path}", headers=headers)

    with contextlib.ExitStack() as stack:
        clients = {
            source: stack.enter_context(httpx.Client(transport=httpx.HTTPTransport(local_address=source)))
            for source in ("127.0.0.2", "127.0.0.3", "127.0.0.9")
        }
        alpha, beta = server.key("alpha"), server.key("beta")
        assert ask("127.0.0.2", alpha).status_code == 200
        for number in range(FAILED_LOGINS):
            answer = ask("127.0.0.2", f"eh_guess_{number}", forwarded=f"192.0.2.{number}, 127.0.0.3")
            assert answer.status_code == 401, answer.text
        for key in ("eh_guess_x", beta):
            for path in ("/v1/models", "/admin/v1/tenants", "/metrics"):
                answer = ask("127.0.0.2", key, path)
                assert answer.status_code == 429
                assert answer.json()["error"]["code"] == "too_many_failed_logins"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert ask("127.0.0.2", alpha).status_code == 200, "a tenant that works from there goes on"
        assert httpx.get(f"{server.base_url}/v1/models").status_code == 401, "no key is no guess"
        assert ask("127.0.0.3", "eh_guess_x").status_code == 401
        assert ask("127.0.0.3", beta, forwarded="127.0.0.2").status_code == 200
        assert ask("127.0.0.9", beta, forwarded="192.0.2.1, 127.0.0.2").status_code == 429, "through a proxy"
        assert ask("127.0.0.9", beta, forwarded="127.0.0.2, 192.0.2.1").status_code == 200


def test_e13_bad_bodies_cost_no_limit_and_hold_up_nobody(server: Any) -> None:
    """A flood of bad bodies and keys by one tenant, while another works."""

    async def flood(client: httpx.AsyncClient, stop: asyncio.Event) -> int:
        sent = 0
        while not stop.is_set():
            bad = {"model": server.model, "messages": "none", "max_tokens": -1}
            answer = await client.post("/v1/chat/completions", json=bad)
            assert answer.status_code == 400, answer.text
            sent += 1
        return sent

    async def scenario() -> int:
        stop = asyncio.Event()
        headers = server.headers("metered")
        async with httpx.AsyncClient(base_url=server.base_url, headers=headers, trust_env=False) as bad:
            floods = [asyncio.create_task(flood(bad, stop)) for _ in range(16)]
            async with server.async_openai("beta") as client:
                for _ in range(20):
                    request = {"model": server.model, "messages": MESSAGES, "max_tokens": 2}
                    assert (await client.chat.completions.create(**request)).usage.completion_tokens == 2
            stop.set()
            return sum(await asyncio.gather(*floods))

    assert asyncio.run(scenario()) > 20, "more than the limit of that tenant"
    with server.openai("metered") as client:
        request = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
        headers = client.chat.completions.with_raw_response.create(**request).headers
    assert headers["x-ratelimit-remaining-requests"] == "19", "none of it was counted"


def test_e04_hanging_up_at_once_is_charged_the_prompt_and_no_more(server: Any) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 4000, "stream": True}
    with server.http("marked") as client:
        for _ in range(5):
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
    server.wait_until(lambda: counters(server, "marked").get("requests") == 5, 15)
    whole = httpx.post(
        f"{server.base_url}/v1/chat/completions",
        json={**body, "max_tokens": 1, "stream": False},
        headers=server.headers("marked"),
        trust_env=False,
    ).json()["usage"]
    server.wait_until(lambda: counters(server, "marked")["requests"] == 6, 5)
    found = counters(server, "marked")
    assert found["input"] <= 6 * whole["prompt_tokens"]
    assert found.get("output", 0) < 5 * 1000


@pytest.mark.slow
def test_a_gateway_is_killed_with_fifty_requests_in_flight(start_server: Any) -> None:
    """Its slots and holds are back within 30 s, every request is on record once, and none is charged twice."""

    def limits(config: dict[str, Any]) -> None:
        user_config = config["applications"][0]["deployments"][0]["user_config"]
        user_config["tenants"].append(
            {
                "id": "crash",
                "api_keys": ["eh_crash_test"],
                "limits": {"max_concurrent_requests": 60, "tokens_per_day": 10**6},
            }
        )

    with start_server("--engine", "stub", change=limits) as server:

        async def scenario() -> None:
            async with server.async_openai("crash") as client:
                request = {"model": server.model, "messages": MESSAGES}
                done = await client.chat.completions.create(max_tokens=5, **request)
                calls = [
                    asyncio.create_task(client.chat.completions.create(max_tokens=8000, **request))
                    for _ in range(50)
                ]
                await asyncio.to_thread(server.wait_until, lambda: server.slots("crash") == 50, 20)
                server.find_process("ray::ServeReplica:evenhand:Gateway").kill()
                answers = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(answer, openai.APIError) for answer in answers)
                expected.update(
                    input=done.usage.prompt_tokens, output=done.usage.completion_tokens, requests=1
                )

        expected: dict[str, int] = {}
        asyncio.run(scenario())
        server.wait_until(lambda: server.slots("crash") == 0, 30)
        files = LedgerFiles(server.data_dir / "ledger")
        server.wait_until(lambda: len(list(files.read(tenant="crash"))) == 51, 40)
        rows = list(files.read(tenant="crash"))
        assert sorted(row["outcome"] for row in rows) == ["lapsed"] * 50 + ["ok"]
        assert counters(server, "crash") == expected
