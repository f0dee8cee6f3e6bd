"""The one error shape of the HTTP API: OpenAI's error object, its status, and what a client may do about it.

Every refusal is an `ApiError` with a code of the table below; nothing else reaches a client. Messages are
written for the caller: no stack, path, class name, key or other tenant's data goes into one.
"""

from __future__ import annotations

import math
from typing import Any

from serve_app.api.responses import sse

_INVALID = "invalid_request_error"
_RATE = "rate_limit_error"
_SERVER = "server_error"

# code -> (status, OpenAI error type)
_CODES: dict[str, tuple[int, str]] = {
    "invalid_request": (400, _INVALID),
    "context_length_exceeded": (400, _INVALID),
    "invalid_api_key": (401, "authentication_error"),
    "model_not_allowed": (403, "permission_error"),
    "route_not_allowed": (403, "permission_error"),
    "model_not_found": (404, "not_found_error"),
    "not_found": (404, "not_found_error"),
    "method_not_allowed": (405, _INVALID),
    "request_timeout": (408, _INVALID),
    "conflict": (409, _INVALID),
    "idempotency_conflict": (409, _INVALID),
    "request_too_large": (413, _INVALID),
    "unsupported_media_type": (415, _INVALID),
    "rate_limit_exceeded": (429, _RATE),
    "tokens_limit_exceeded": (429, _RATE),
    "concurrency_limit_exceeded": (429, _RATE),
    "too_many_failed_logins": (429, _RATE),
    "queue_full": (429, _RATE),
    "budget_exceeded": (429, "insufficient_quota"),
    "internal_error": (500, _SERVER),
    "overloaded": (503, _SERVER),
    "queue_timeout": (503, _SERVER),
    "deadline_unattainable": (503, _SERVER),
    "engine_unavailable": (503, _SERVER),
    "gateway_unavailable": (503, _SERVER),
    "quota_store_unavailable": (503, _SERVER),
    "deadline_exceeded": (504, _SERVER),
}
_RETRY_CANNOT_HELP = frozenset(
    {"conflict", "idempotency_conflict", "budget_exceeded", "deadline_unattainable"}
)
_RETRY_STATUSES = frozenset({429, 503})
_DEFAULT_RETRY_MS = 1000


def known_codes() -> list[str]:
    """Every code a client may see."""
    return list(_CODES)


class ApiError(Exception):
    """A refusal, ready for the client.

    `code` is one of the table above and decides status and type; an unknown one is a ValueError. `param`
    names a field of the request, never its value. `retry_after_ms` is sent with every 429 and 503 (1 s when
    not known). `trace_id` goes into the body of a 500. `should_retry` False: the same request can never succeed.
    `earliest_deadline_ms` goes into the body of a refused deadline.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_ms: float | None = None,
        status: int | None = None,
        trace_id: str | None = None,
        should_retry: bool | None = None,
        earliest_deadline_ms: int | None = None,
    ) -> None:
        if code not in _CODES:
            raise ValueError(f"unknown error code {code!r}")
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = status or _CODES[code][0]
        self.type = _CODES[code][1]
        self.trace_id = trace_id
        self._should_retry = should_retry
        self._earliest_deadline_ms = earliest_deadline_ms
        if retry_after_ms is None and self.status in _RETRY_STATUSES:
            retry_after_ms = _DEFAULT_RETRY_MS
        self.retry_after_ms = retry_after_ms

    @property
    def should_retry(self) -> bool | None:
        """False where a retry cannot help; None leaves it to the client's own rule for the status."""
        return False if self.code in _RETRY_CANNOT_HELP else self._should_retry

    def to_body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self._earliest_deadline_ms is not None:
            error["earliest_deadline_ms"] = self._earliest_deadline_ms
        if self.trace_id is not None:
            error["trace_id"] = self.trace_id
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Retry advice in the forms clients read: whole seconds (rounded up), milliseconds, yes or no."""
        headers: dict[str, str] = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after_ms is not None:
            milliseconds = max(1, math.ceil(self.retry_after_ms))
            headers["Retry-After"] = str(math.ceil(milliseconds / 1000))
            headers["retry-after-ms"] = str(milliseconds)
        if self.should_retry is False:
            headers["x-should-retry"] = "false"
        return headers

    def to_sse(self) -> bytes:
        """The same object as one event, for a stream that has already begun."""
        return sse(self.to_body())


def quote(value: str, limit: int = 64) -> str:
    """A caller's text for a message: quoted, without control characters, cut to `limit` characters."""
    shown = value if len(value) <= limit else value[:limit] + "…"
    return "'" + "".join(char if char.isprintable() else "�" for char in shown) + "'"


def invalid_request(message: str, param: str | None = None) -> ApiError:
    """The request itself is wrong; `param` names the field."""
    return ApiError("invalid_request", message, param=param)


def context_length_exceeded(limit: int, prompt_tokens: int, max_tokens: int, param: str) -> ApiError:
    """Prompt plus requested output do not fit the context (all in tokens)."""
    return ApiError(
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. The request asks for "
        f"{prompt_tokens + max_tokens}: {prompt_tokens} in the prompt and {max_tokens} for the completion.",
        param=param,
    )


def invalid_api_key() -> ApiError:
    """No key, an unknown one or a revoked one: the same words for all, so that none can be told apart."""
    return ApiError(
        "invalid_api_key", "Missing or invalid API key. Send it as 'Authorization: Bearer <key>'."
    )


def too_many_failed_logins(retry_after_ms: float) -> ApiError:
    """Wrong keys came from this address too often: the key that came now has not been looked at."""
    return ApiError(
        "too_many_failed_logins",
        "Too many requests with an invalid API key have come from your address. Try again later.",
        retry_after_ms=retry_after_ms,
    )


def model_not_allowed(model: str) -> ApiError:
    """The tenant may not use this model."""
    return ApiError("model_not_allowed", f"This API key may not use the model {quote(model)}.", param="model")


def route_not_allowed() -> ApiError:
    """The key does not open this route."""
    return ApiError("route_not_allowed", "This API key may not be used for this address.")


def model_not_found(model: str) -> ApiError:
    """No served model or alias has this name."""
    return ApiError("model_not_found", f"The model {quote(model)} does not exist.", param="model")


def not_found() -> ApiError:
    """No such route."""
    return ApiError("not_found", "There is nothing at this address.")


def method_not_allowed() -> ApiError:
    """The route exists, but not for this method."""
    return ApiError("method_not_allowed", "This address does not take that HTTP method.")


def unsupported_media_type() -> ApiError:
    """The body is not declared as JSON."""
    return ApiError(
        "unsupported_media_type",
        "The request body must be JSON in UTF-8: send 'Content-Type: application/json'.",
    )


def unsupported_encoding() -> ApiError:
    """The body is compressed."""
    return ApiError(
        "unsupported_media_type", "The request body must not be compressed: send no 'Content-Encoding'."
    )


def idempotency_conflict() -> ApiError:
    """An idempotency key came again with another body."""
    return ApiError("idempotency_conflict", "This idempotency key was already used with a different request.")


def request_too_large(limit_bytes: int) -> ApiError:
    """The body is larger than the server takes."""
    return ApiError("request_too_large", f"The request body is larger than {limit_bytes} bytes.")


def headers_too_large() -> ApiError:
    """The header block is larger than the server takes."""
    return ApiError("request_too_large", "The request headers are too large.", status=431)


def request_timeout() -> ApiError:
    """The client did not send its request in time."""
    return ApiError("request_timeout", "The request did not arrive whole in time.")


def gateway_unavailable() -> ApiError:
    """No gateway took the request, or the one that had it is gone."""
    return ApiError(
        "gateway_unavailable", "The server is starting, stopping or has just lost a part. Try again shortly."
    )


def internal_error(trace_id: str | None = None) -> ApiError:
    """A fault of ours: fixed words and the trace id, whatever happened."""
    return ApiError("internal_error", "The server failed to answer this request.", trace_id=trace_id)
