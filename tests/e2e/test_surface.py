"""What the API offers beside generation, and how it behaves with headers: tokens, OpenAPI, CORS, idempotency."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REQUEST = {"model": "default", "prompt": "Hello", "max_tokens": 30}


def test_tokens_of_a_text_and_back(stub: Any) -> None:
    with stub.http() as client:
        tokens = client.post("/tokenize", json={"model": "default", "prompt": "héllo"}).json()
        assert tokens == {"count": 6, "max_model_len": 8192, "tokens": list("héllo".encode())}
        text = client.post("/detokenize", json={"model": "default", "tokens": tokens["tokens"]}).json()
        assert text == {"prompt": "héllo"}
        messages = [{"role": "user", "content": "Hello"}]
        chat = client.post("/tokenize", json={"model": "default", "messages": messages}).json()
        answer = client.post(CHAT, json={"model": "default", "messages": messages, "max_tokens": 1}).json()
        assert chat["count"] == answer["usage"]["prompt_tokens"]
        for path, request, param in (
            ("/tokenize", {"model": "default"}, "prompt"),
            ("/tokenize", {"model": "default", "prompt": "x", "messages": messages}, "prompt"),
            ("/detokenize", {"model": "default", "tokens": [259]}, "tokens"),
            ("/detokenize", {"model": "default", "tokens": ["x"]}, "tokens[0]"),
        ):
            refused = client.post(path, json=request)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert client.post("/tokenize", json={"model": "no", "prompt": "x"}).status_code == 404


def test_the_document_names_every_route(stub: Any) -> None:
    with stub.http() as client:
        document = client.get("/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answer = client.request(method, path.replace("{model}", "default"), json={})
                assert str(answer.status_code) in operation["responses"], (method, path, answer.text)
                assert answer.status_code != 404 and answer.status_code != 405
        for name in ("ChatCompletionRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
            assert name in document["components"]["schemas"]


def test_pages_of_the_named_origins_may_call(stub: Any) -> None:
    """They are told so before they send a key, and see every answer, errors included."""
    asking = {"Origin": stub.origin, "Access-Control-Request-Method": "POST"}
    with stub.http(None) as client:
        asked = client.options(
            CHAT, headers={**asking, "Access-Control-Request-Headers": "authorization,content-type"}
        )
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == stub.origin
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        refused = client.post(CHAT, json={}, headers={"Origin": stub.origin})
        assert refused.status_code == 401
    with stub.http() as client:
        answer = client.post(TEXT, json={**REQUEST, "max_tokens": 1}, headers={"Origin": stub.origin})
    for seen in (refused, answer):
        assert seen.headers["access-control-allow-origin"] == stub.origin
        assert "access-control-allow-credentials" not in seen.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://chat.example.evil.example", "x"])
def test_F11_a_browser_of_another_origin_gets_no_permission(stub: Any, origin: str) -> None:
    with stub.http() as client:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        asked = client.options(CHAT, headers=headers)
        assert asked.status_code == 400 and asked.json()["error"]["code"] == "invalid_request"
        answer = client.get("/v1/models", headers=headers)
    assert "access-control-allow-origin" not in {**asked.headers, **answer.headers}


def test_the_same_key_and_body_get_one_answer(stub: Any) -> None:
    """Also of another seed of luck: without a seed every run draws its own id."""
    with stub.http("metered") as client:
        headers = {"Idempotency-Key": "first"}
        first = client.post(TEXT, json=REQUEST, headers=headers)
        again = client.post(TEXT, json=REQUEST, headers=headers)
        assert first.status_code == again.status_code == 200
        assert again.content == first.content
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        conflict = client.post(TEXT, json={**REQUEST, "max_tokens": 31}, headers=headers)
        assert conflict.status_code == 409
        assert conflict.json()["error"]["code"] == "idempotency_conflict"
        assert conflict.headers["x-should-retry"] == "false"
        other = client.post(TEXT, json=REQUEST, headers={"Idempotency-Key": "second"})
        assert other.json()["id"] != first.json()["id"]
        remaining = int(other.headers["x-ratelimit-remaining-requests"])
        assert int(first.headers["x-ratelimit-remaining-requests"]) - remaining <= 1, (
            "the repetition was charged"
        )
        twice = client.post(TEXT, json=REQUEST, headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")])
        assert twice.status_code == 400
        streamed = client.post(TEXT, json={**REQUEST, "stream": True}, headers={"Idempotency-Key": "third"})
        assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "stream"
    with stub.http("beta") as client:
        mine = client.post(TEXT, json=REQUEST, headers=headers)
    assert mine.json()["id"] != first.json()["id"], "the key is a tenant's own"


def test_who_comes_while_it_runs_waits_for_the_answer(stub: Any) -> None:
    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=stub.base_url, headers=stub.headers(), timeout=60) as client:
            request = {**REQUEST, "max_tokens": 200}
            post = [client.post(TEXT, json=request, headers={"Idempotency-Key": "many"}) for _ in range(8)]
            return list(await asyncio.gather(*post))

    before = stub.metric("served_tokens_total", tenant="alpha", kind="output")
    answers = asyncio.run(ask_all())
    assert {answer.content for answer in answers} == {answers[0].content}
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 7
    stub.wait_until(stub.is_idle, 5)
    assert stub.metric("served_tokens_total", tenant="alpha", kind="output") - before == 200


def test_B01_who_waits_for_one_that_leaves_gets_an_answer_of_its_own(stub: Any) -> None:
    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(base_url=stub.base_url, headers=stub.headers(), timeout=60) as client:
            request = {**REQUEST, "max_tokens": 150}
            first, second = (
                asyncio.create_task(client.post(TEXT, json=request, headers={"Idempotency-Key": "left"}))
                for _ in range(2)
            )
            await asyncio.to_thread(stub.wait_until, lambda: stub.metric("num_requests_running") == 1, 10)
            first.cancel()
            return await second

    answer = asyncio.run(scenario())
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 150


def test_a_refusal_is_not_kept(stub: Any) -> None:
    headers = {"Idempotency-Key": "refused"}
    with stub.http("narrow") as client:
        refused = client.post(TEXT, json={**REQUEST, "prompt": ["a", "b", "c"]}, headers=headers)
        assert refused.status_code == 429
        assert client.post(TEXT, json=REQUEST, headers=headers).status_code == 200


def test_one_request_id_of_two_tenants(stub: Any) -> None:
    """What a client calls its request is a name in its own log lines, nothing more."""

    async def ask(tenant: str, prompt: str) -> Any:
        async with stub.async_openai(tenant) as client:
            return await client.completions.create(
                model=stub.model, prompt=prompt, max_tokens=100, extra_headers={"x-request-id": "the-same"}
            )

    async def both() -> list[Any]:
        return await asyncio.gather(ask("alpha", "a"), ask("beta", "bb"), ask("alpha", "ccc"))

    answers = asyncio.run(both())
    assert [answer.usage.prompt_tokens for answer in answers] == [1, 2, 3]
    assert len({answer.id for answer in answers}) == 3

    def tenants() -> list[str]:
        return sorted(line["tenant"] for line in stub.access_log() if line["request"] == "the-same")

    stub.wait_until(lambda: len(tenants()) == 3, 5)
    assert tenants() == ["alpha", "alpha", "beta"]


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
def test_F07_other_credentials_are_none(stub: Any, header: str) -> None:
    with stub.http(None) as client:
        answer = client.get("/v1/models", headers={header: stub.key("alpha")})
        in_query = client.get(f"/v1/models?api_key={stub.key('alpha')}")
    assert answer.status_code == in_query.status_code == 401


def test_F07_two_credentials_are_none(stub: Any) -> None:
    pairs = [
        ("Authorization", f"Bearer {stub.key('alpha')}"),
        ("authorization", f"Bearer {stub.key('beta')}"),
    ]
    with stub.http(None) as client:
        assert client.get("/v1/models", headers=pairs).status_code == 401
        assert client.get("/v1/models", headers=[pairs[0], pairs[0]]).status_code == 401


def test_F07_headers_and_fields_that_name_a_tenant_mean_nothing(stub: Any) -> None:
    names = ("X-Tenant", "x_tenant", "User", "X-User", "X-Forwarded-User", "OpenAI-Organization")
    headers = {**dict.fromkeys(names, "alpha"), "x-request-id": "who-am-i"}
    with stub.openai("beta") as client:
        client.completions.create(
            model=stub.model, prompt="Hello", max_tokens=1, user="alpha", extra_headers=headers
        )

    def lines() -> list[dict[str, Any]]:
        return [line for line in stub.access_log() if line["request"] == "who-am-i"]

    stub.wait_until(lambda: len(lines()) == 1, 5)
    assert lines()[0]["tenant"] == "beta"


def test_async_client_sees_the_error_of_a_stream_that_was_never_opened(stub: Any) -> None:
    async def ask() -> None:
        async with stub.async_openai() as client:
            await client.completions.create(model=stub.model, prompt="x" * 9000, stream=True)

    with pytest.raises(openai.BadRequestError) as refused:
        asyncio.run(ask())
    assert refused.value.code == "context_length_exceeded"
