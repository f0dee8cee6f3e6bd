"""Limits in the words of the API: headers, errors, and lengths that a tenant may not ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.api.endpoints import ParsedRequest
from serve_app.api.errors import ApiError, invalid_request
from tenancy.limits import applicable
from tenancy.models import Limits, ServiceClass, Tenant
from tenancy.quota import DayUsage, Hold, QuotaRefusal

_UNITS = {
    "requests_per_minute": "{limit} requests per minute",
    "tokens_per_minute": "{limit} tokens per minute",
    "max_concurrent_requests": "{limit} concurrent requests",
    "tokens_per_day": "{limit} tokens per day",
    "tokens_per_month": "{limit} tokens per month",
    "cost_per_day": "{cost:g} of cost per day",
    "cost_per_month": "{cost:g} of cost per month",
}


def rate_headers(outcome: Hold | QuotaRefusal) -> dict[str, str]:
    """x-ratelimit-* as OpenAI sends them: of several limits, the one with the least left."""
    headers: dict[str, str] = {}
    for what, rate in (("requests", outcome.requests), ("tokens", outcome.tokens)):
        if rate is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{what}"] = f"{rate.reset_ms / 1000:g}s"
    return headers


def quota_error(refusal: QuotaRefusal) -> ApiError:
    """The 429 that names the limit."""
    limit = _UNITS[refusal.limit_name].format(limit=refusal.limit, cost=refusal.limit / 1e9)
    message = f"The limit of this {refusal.scope}, {limit}, "
    if refusal.retry_after_ms is None:
        message += "is smaller than this request."
    else:
        message += "has been reached."
    return ApiError(
        refusal.code,
        message,
        retry_after_ms=refusal.retry_after_ms,
        should_retry=False if refusal.retry_after_ms is None else None,
    )


def usage_of_day(day: DayUsage) -> dict[str, Any]:
    """One entry of /v1/usage. `cost` is in the currency of the price table."""
    return {
        "date": day.day.isoformat(),
        "model": day.model,
        "requests": day.requests,
        "input_tokens": day.input_tokens,
        "cached_tokens": day.cached_tokens,
        "output_tokens": day.output_tokens,
        "cost": day.price_nano / 1e9,
    }


def fit_lengths(
    parsed: ParsedRequest,
    tenant: Tenant,
    model: str,
    service_class: ServiceClass,
    key_limits: Limits | None,
) -> ParsedRequest:
    """The request within the lengths its tenant may use. An output limit the client did not set is lowered.

    Raises ApiError 400 for a longer prompt, or a larger output limit that the client did set.
    """
    blocks = [limits for _, _, limits in applicable(tenant, model, service_class, "", key_limits)]
    longest = max(len(prompt) for prompt in parsed.prompts)
    allowed = min((b.max_input_tokens for b in blocks if b.max_input_tokens is not None), default=longest)
    if longest > allowed:
        raise invalid_request(
            f"A prompt of this API key may have at most {allowed} tokens; this one has {longest}."
        )
    asked = parsed.max_tokens
    allowed = min((b.max_output_tokens for b in blocks if b.max_output_tokens is not None), default=asked)
    if asked <= allowed:
        return parsed
    if parsed.max_tokens_given:
        raise invalid_request(
            f"An answer to this API key may have at most {allowed} tokens; asked for are {asked}.",
            "max_tokens",
        )
    return replace(parsed, sampling=replace(parsed.sampling, max_tokens=allowed))
