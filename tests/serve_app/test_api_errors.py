from __future__ import annotations

import json

import httpx
import openai
import pytest

from serve_app.api import errors
from serve_app.api.errors import ApiError

TABLE = {
    400: ["invalid_request", "context_length_exceeded"],
    401: ["invalid_api_key"],
    403: ["model_not_allowed", "route_not_allowed"],
    404: ["model_not_found", "not_found"],
    405: ["method_not_allowed"],
    408: ["request_timeout"],
    409: ["conflict", "idempotency_conflict"],
    413: ["request_too_large"],
    415: ["unsupported_media_type"],
    429: [
        "rate_limit_exceeded",
        "tokens_limit_exceeded",
        "concurrency_limit_exceeded",
        "budget_exceeded",
        "queue_full",
        "too_many_failed_logins",
    ],
    500: ["internal_error"],
    503: [
        "overloaded",
        "queue_timeout",
        "deadline_unattainable",
        "engine_unavailable",
        "gateway_unavailable",
        "quota_store_unavailable",
    ],
    504: ["deadline_exceeded"],
}
SDK_CLASSES = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    503: openai.InternalServerError,
    504: openai.InternalServerError,
}
CASES = [(status, code) for status, codes in TABLE.items() for code in codes]


@pytest.mark.parametrize(("status", "code"), CASES)
def test_every_code_has_its_status_and_the_one_shape(status: int, code: str) -> None:
    error = ApiError(code, "words", param="field")
    assert error.status == status
    body = error.to_body()["error"]
    assert body == {"message": "words", "type": error.type, "param": "field", "code": code}
    assert ("Retry-After" in error.headers()) is (status in (429, 503))


def test_the_table_is_complete() -> None:
    assert sorted(errors._CODES) == sorted(code for _, code in CASES)


@pytest.mark.parametrize(("status", "code"), CASES)
def test_the_sdk_raises_the_matching_class(status: int, code: str) -> None:
    error = ApiError(code, "words", param="field")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(error.status, json=error.to_body(), headers=error.headers())

    http_client = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(api_key="k", base_url="http://test/v1", max_retries=0, http_client=http_client)
    with pytest.raises(openai.APIStatusError) as caught:
        client.models.list()
    assert type(caught.value) is SDK_CLASSES.get(status, openai.APIStatusError)
    assert (caught.value.code, caught.value.param, caught.value.type) == (code, "field", error.type)


@pytest.mark.parametrize(
    ("milliseconds", "seconds", "exact"),
    [(1, "1", "1"), (999.2, "1", "1000"), (1000, "1", "1000"), (1001, "2", "1001")],
)
def test_retry_advice_is_rounded_up(milliseconds: float, seconds: str, exact: str) -> None:
    headers = ApiError("queue_full", "words", retry_after_ms=milliseconds).headers()
    assert (headers["Retry-After"], headers["retry-after-ms"]) == (seconds, exact)


def test_retry_advice_is_never_zero_nor_missing() -> None:
    assert ApiError("overloaded", "words").headers()["retry-after-ms"] == "1000"
    assert ApiError("overloaded", "words", retry_after_ms=0).headers()["Retry-After"] == "1"


@pytest.mark.parametrize(("status", "code"), CASES)
def test_a_retry_that_cannot_help_is_said_to_be_one(status: int, code: str) -> None:
    expected = (
        "false"
        if code in ("budget_exceeded", "conflict", "deadline_unattainable", "idempotency_conflict")
        else None
    )
    assert ApiError(code, "words").headers().get("x-should-retry") == expected


def test_the_sdk_does_not_retry_where_told_so() -> None:
    calls = []
    error = ApiError("budget_exceeded", "words")

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(error.status, json=error.to_body(), headers=error.headers())

    http_client = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(api_key="k", base_url="http://test/v1", max_retries=3, http_client=http_client)
    with pytest.raises(openai.RateLimitError):
        client.models.list()
    assert len(calls) == 1


def test_an_unknown_code_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="no_such_code"):
        ApiError("no_such_code", "words")


def test_fixed_words_of_the_helpers() -> None:
    assert errors.invalid_api_key().headers()["WWW-Authenticate"] == "Bearer"
    assert errors.headers_too_large().status == 431
    assert errors.request_too_large(10).to_body()["error"]["code"] == "request_too_large"
    assert errors.internal_error("abc").to_body()["error"]["trace_id"] == "abc"
    assert "trace_id" not in errors.internal_error().to_body()["error"]
    message = errors.context_length_exceeded(8192, 8000, 300, "max_tokens").message
    assert all(number in message for number in ("8192", "8000", "300", "8300"))


def test_a_callers_text_in_a_message_is_harmless() -> None:
    message = errors.model_not_found("a\r\nSet-Cookie: x\x00\x1b[31m\u202e" + "y" * 10_000).message
    assert message.isprintable() and len(message) < 150


def test_an_error_inside_a_stream_is_one_event_the_sdk_raises() -> None:
    event = ApiError("deadline_exceeded", "too late\nreally").to_sse()
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    assert json.loads(event[6:])["error"]["code"] == "deadline_exceeded"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=event, headers={"content-type": "text/event-stream"})

    http_client = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(api_key="k", base_url="http://test/v1", max_retries=0, http_client=http_client)
    stream = client.completions.create(model="m", prompt="p", stream=True)
    with pytest.raises(openai.APIError, match="too late"):
        list(stream)
