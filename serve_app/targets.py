"""What a client asks of one request's time: deadlines, a pace, a class; and what it is told about them."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, replace
from typing import Literal

from starlette.datastructures import Headers

from policies.tickets import Grant, Refusal, ServiceClass, Ticket
from serve_app.api.errors import ApiError, invalid_request
from tenancy.models import Tenant

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
DEADLINE_HEADER = "x-slo-deadline-ms"
ADMISSION_HEADER = "x-slo-admission"
"""In the answer to a request with a deadline: "admitted" or "demoted"."""

MAX_TARGET_MS = 3_600_000
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_CLASSES: dict[str, ServiceClass] = {"priority": "interactive", "default": "default", "flex": "batch"}

Tier = Literal["auto", "default", "flex", "priority"]


@dataclass(frozen=True)
class Targets:
    """Times in milliseconds, since the request arrived where they are deadlines. `itl_ms` is the pool's own target."""

    service_class: ServiceClass = "default"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    deadline_ms: float | None = None
    itl_ms: float | None = None
    demotable: bool = False

    @property
    def has_deadline(self) -> bool:
        return self.ttft_ms is not None or self.deadline_ms is not None

    def put_on(self, ticket: Ticket, *, elapsed_ms: float, output_tokens_bound: int) -> Ticket:
        """The ticket with what is left `elapsed_ms` after the request arrived."""
        if not self.has_deadline:
            return ticket
        return replace(
            ticket,
            remaining_ttft_ms=None if self.ttft_ms is None else self.ttft_ms - elapsed_ms,
            remaining_deadline_ms=None if self.deadline_ms is None else self.deadline_ms - elapsed_ms,
            demotable=self.demotable,
            output_tokens_bound=output_tokens_bound,
        )

    def admission(self, grant: Grant) -> Literal["admitted", "demoted"] | None:
        """What became of the deadline; None where none was asked for, or the queue's order promises nothing."""
        if grant.demoted:
            return "demoted"
        return None if grant.predicted_ttft_ms is None else "admitted"


def read_targets(headers: Headers, tier: Tier, tenant: Tenant, itl_ms: float | None) -> Targets:
    """Targets from the x-slo headers and `service_tier`. Raises ApiError 400."""
    name = "default" if tier == "auto" else tier
    if name not in tenant.service_tiers:
        allowed = ", ".join(tenant.service_tiers)
        raise invalid_request(
            f"service_tier: {name!r} is not open to this tenant; allowed: {allowed}.", "service_tier"
        )
    return Targets(
        service_class=_CLASSES[name],
        ttft_ms=_milliseconds(headers, TTFT_HEADER),
        tpot_ms=_milliseconds(headers, TPOT_HEADER),
        deadline_ms=_milliseconds(headers, DEADLINE_HEADER),
        itl_ms=itl_ms,
        demotable=tenant.unattainable_deadline == "demote",
    )


def refusal_error(refusal: Refusal, elapsed_ms: float) -> ApiError:
    """A refusal of the fair queue as an error; `elapsed_ms` after the request arrived the queue was asked first."""
    message = refusal.message[:1].upper() + refusal.message[1:] + "."
    earliest = refusal.earliest_deadline_ms
    if earliest is not None:
        earliest = math.ceil(earliest + elapsed_ms)
        message += f" The earliest that could be promised now is {earliest} ms."
    return ApiError(
        refusal.code, message, retry_after_ms=refusal.retry_after_ms, earliest_deadline_ms=earliest
    )


def elapsed_when_asked(now_ms: float, asked_at: float) -> float:
    """Milliseconds from a request's arrival, `now_ms` ago, to the monotonic time `asked_at`."""
    return now_ms - (time.monotonic() - asked_at) * 1e3


def _milliseconds(headers: Headers, name: str) -> float | None:
    sent = headers.getlist(name)
    if not sent:
        return None
    if len(sent) > 1:
        raise invalid_request(f"{name}: must be sent once.", name)
    [text] = sent
    value = float(text) if _NUMBER.fullmatch(text.strip()) else 0.0
    if not 0.0 < value <= MAX_TARGET_MS:
        raise invalid_request(
            f"{name}: must be a number of milliseconds above 0, at most {MAX_TARGET_MS}.", name
        )
    return value
