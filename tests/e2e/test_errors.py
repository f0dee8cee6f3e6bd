"""What goes wrong gets one clear answer in the OpenAI shape, takes nothing, and leaves the engine at work."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _goes_on(stub: Any) -> Iterator[None]:
    """After every mistake the next request is served."""
    yield
    with stub.openai() as client:
        answer = client.chat.completions.create(model=stub.model, messages=HELLO, max_tokens=4)
    assert answer.usage.completion_tokens == 4
    assert stub.health() == 200


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object; fails for any other shape."""
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert error["message"] and error["type"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return dict(error)


@pytest.mark.parametrize(
    "path",
    [CHAT, "/v1/completions", "/v1/models", "/metrics", "/openapi.json", "/tokenize", "/detokenize"],
)
@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer eh_alpha_wrong", "Bearer", "eh_alpha_demo", "Basic eh_alpha_demo", "Bearer é"],
)
def test_no_or_wrong_key(stub: Any, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    with stub.http(None) as client:
        method = "GET" if path in ("/v1/models", "/metrics", "/openapi.json") else "POST"
        answer = client.request(method, path, headers=headers, content=b"{}" if method == "POST" else None)
    assert answer.status_code == 401
    error = error_of(answer)
    assert error["code"] == "invalid_api_key"
    assert "eh_alpha" not in error["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


def test_wrong_key_as_the_client_sees_it(stub: Any) -> None:
    with (
        stub.openai(api_key="eh_alpha_wrong") as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.chat.completions.create(model=stub.model, messages=HELLO)
    assert refused.value.code == "invalid_api_key"


def test_a_tenant_named_in_the_request_changes_nothing(stub: Any) -> None:
    with stub.http("beta") as client:
        client.post(
            CHAT,
            json={
                "model": stub.model,
                "messages": HELLO,
                "max_tokens": 1,
                "user": "alpha",
                "tenant": "alpha",
            },
            headers={"x-tenant": "alpha", "x-request-id": "named-tenant"},
        ).raise_for_status()
    stub.wait_until(lambda: any(line["request"] == "named-tenant" for line in stub.access_log()), 5)
    [line] = [line for line in stub.access_log() if line["request"] == "named-tenant"]
    assert line["tenant"] == "beta"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"model": NaN}', b"{}", b'{"model":"default"}'],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_wrong_json(stub: Any, path: str, body: bytes) -> None:
    with stub.http() as client:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 9}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_wrong_field(stub: Any, fields: dict[str, Any], param: str) -> None:
    with stub.openai() as client, pytest.raises(openai.BadRequestError) as refused:
        request = {"messages": HELLO, **fields}
        client.chat.completions.create(model=stub.model, messages=request.pop("messages"), extra_body=request)
    assert refused.value.code == "invalid_request"
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_unknown_model(stub: Any) -> None:
    with stub.openai() as client, pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"
    assert "'gpt-4'" in refused.value.message


def test_prompt_over_the_context_costs_nothing(stub: Any) -> None:
    def remaining() -> int:
        answer = client.chat.completions.with_raw_response.create(
            model=stub.model, messages=HELLO, max_tokens=1
        )
        return int(answer.headers["x-ratelimit-remaining-requests"])

    with stub.openai("metered") as client:
        before = remaining()
        for stream in (False, True):
            for fields in ({"messages": [{"role": "user", "content": "x" * 9000}]}, {"max_tokens": 9000}):
                request = {"model": stub.model, "messages": HELLO, "stream": stream, **fields}
                with pytest.raises(openai.BadRequestError) as refused:
                    client.chat.completions.create(**request)
                assert refused.value.code == "context_length_exceeded"
                assert refused.value.param == next(iter(fields))
                assert "8192" in refused.value.message
        assert remaining() >= before - 1, "the refused requests were counted"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "application/json", "Content-Encoding": "br, identity"},
    ],
)
def test_wrong_content_type(stub: Any, headers: dict[str, str]) -> None:
    with stub.http() as client:
        answer = client.post(CHAT, content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("parameters", ["", ";", "; charset=utf8;", ';CHARSET="UTF-8"', "; profile=x"])
def test_content_types_that_mean_json(stub: Any, parameters: str) -> None:
    with stub.http() as client:
        headers = {"Content-Type": f"Application/JSON{parameters}"}
        answer = client.post("/tokenize", content=b'{"model": "default", "prompt": "x"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_body_too_large(stub: Any, declared: bool) -> None:
    body = b'{"model": "default", "prompt": "' + b"x" * (4 << 20) + b'"}'
    content = body if declared else (body[i : i + 65536] for i in range(0, len(body), 65536))
    with stub.http() as client:
        answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("PUT", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/health")],
)
def test_wrong_method(stub: Any, method: str, path: str) -> None:
    with stub.http() as client:
        answer = client.request(method, path)
    assert answer.status_code == 405
    assert error_of(answer)["code"] == "method_not_allowed"
    assert method not in answer.headers["allow"] and answer.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/docs", "/redoc"])
def test_unknown_path(stub: Any, path: str) -> None:
    with stub.http() as client:
        answer = client.get(path)
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"


def test_sixth_request_of_limited_waits(stub: Any) -> None:
    """5 requests a minute: all at once, and each comes back a minute after it was used."""
    begin = time.monotonic()
    with stub.openai("limited") as client:
        for left in (4, 3, 2, 1, 0):
            answer = client.chat.completions.with_raw_response.create(
                model=stub.model, messages=HELLO, max_tokens=1
            )
            assert answer.headers["x-ratelimit-limit-requests"] == "5"
            assert int(answer.headers["x-ratelimit-remaining-requests"]) == left
        waits = []
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as refused:
                client.chat.completions.create(model=stub.model, messages=HELLO, max_tokens=1)
            assert refused.value.code == "rate_limit_exceeded"
            assert refused.value.type == "rate_limit_error"
            headers = refused.value.response.headers
            assert headers["x-ratelimit-remaining-requests"] == "0"
            waits.append(int(headers["retry-after-ms"]))
            assert int(headers["retry-after"]) == math.ceil(waits[-1] / 1000)
    elapsed_ms = (time.monotonic() - begin) * 1000
    assert 60_000 - elapsed_ms - 1 <= waits[0] <= 60_000
    assert waits[1] <= waits[0], "a refusal costs nothing"
    with stub.openai("alpha") as client:
        client.chat.completions.create(model=stub.model, messages=HELLO, max_tokens=1)


def test_retry_after_is_right(stub: Any) -> None:
    """The advice of a 429 is neither too short nor, for the client that follows it by itself, in vain."""
    request = {"model": stub.model, "messages": HELLO, "max_tokens": 1}
    with stub.openai("brisk") as client:
        client.chat.completions.create(**request)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**request)
        milliseconds = int(refused.value.response.headers["retry-after-ms"])
        assert 0 < milliseconds <= 1000
        time.sleep(milliseconds / 1000)
        client.chat.completions.create(**request)
        answer = client.with_options(max_retries=2).chat.completions.create(**request)
    assert answer.usage.completion_tokens == 1


def test_concurrency_limit(stub: Any) -> None:
    request = {"model": stub.model, "messages": HELLO}
    with stub.openai("narrow") as client:
        streams = [client.chat.completions.create(max_tokens=4000, stream=True, **request) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(max_tokens=1, **request)
        assert refused.value.code == "concurrency_limit_exceeded"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=stub.model, prompt=["a", "b", "c"], max_tokens=1)
        streams[0].close()
        stub.wait_until(lambda: stub.slots("narrow") == 1, 5)
        client.chat.completions.create(max_tokens=1, **request)
        streams[1].close()
        stub.wait_until(lambda: stub.slots("narrow") == 0, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_request_id_comes_back(stub: Any, stream: bool) -> None:
    body = {"model": stub.model, "messages": HELLO, "max_tokens": 1, "stream": stream}
    with stub.http() as client:
        given = client.post(CHAT, json=body, headers={"x-request-id": "my-own-id_1"})
        made = [client.post(CHAT, json=body).headers["x-request-id"] for _ in range(2)]
        failed = client.post(CHAT, content=b"{", headers={"x-request-id": "my-own-id_2"})
    assert given.headers.get_list("x-request-id") == ["my-own-id_1"]
    assert failed.headers.get_list("x-request-id") == ["my-own-id_2"]
    assert made[0] != made[1]


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/version"])
def test_open_routes_need_no_key_and_tell_little(stub: Any, path: str) -> None:
    with stub.http(None) as client:
        answer = client.get(path)
    assert answer.status_code == 200
    assert len(answer.json()) == 1


def test_stub_answers_are_whole(stub: Any) -> None:
    """Streamed or not, the same bytes."""
    request = {"model": stub.model, "messages": HELLO, "max_tokens": 200}
    with stub.openai() as client:
        whole = client.chat.completions.create(**request).choices[0].message.content
        chunks = client.chat.completions.create(stream=True, **request)
        streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert len(whole) == 200
    assert streamed == whole
    assert "The stub engine has no model. " in whole


def test_two_instances_do_not_disturb_each_other(stub: Any, real: Any) -> None:
    """On one machine, each with its own port, files and processes; each sees its own requests only."""
    for server in (stub, real):
        mark = f"only-for-{server.port}"
        with server.openai("beta") as client:
            answer = client.chat.completions.create(
                model=server.model, messages=HELLO, max_tokens=2, extra_headers={"x-request-id": mark}
            )
        assert answer.usage.completion_tokens == 2
        server.wait_until(lambda s=server, m=mark: m in [line["request"] for line in s.access_log()], 5)
    for server, other in ((stub, real), (real, stub)):
        assert f"only-for-{other.port}" not in [line["request"] for line in server.access_log()]
        assert not set(server.remember()) & set(other.remember())
        assert server.health() == 200
