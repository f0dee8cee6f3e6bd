"""The x-slo headers, service tiers, and what is said about a deadline that cannot be promised."""

from __future__ import annotations

import time
from typing import Any

import pytest
from starlette.datastructures import Headers

from policies.tickets import Grant, Refusal, Ticket
from serve_app.api.errors import ApiError
from serve_app.pool import _aged
from serve_app.targets import Targets, elapsed_when_asked, read_targets, refusal_error
from serve_app.telemetry.metrics import GatewayMetrics
from serve_app.telemetry.records import RequestRecord
from tenancy.models import Tenant

TENANT = Tenant(id="a")


def test_headers_and_tier_become_targets() -> None:
    headers = Headers({"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "40.5", "x-slo-deadline-ms": " 9000 "})
    strict = read_targets(headers, "priority", TENANT, 30.0)
    assert strict == Targets("interactive", 250.0, 40.5, 9000.0, 30.0, demotable=False)
    soft = read_targets(Headers(), "auto", Tenant(id="b", unattainable_deadline="demote"), None)
    assert soft == Targets("default", demotable=True) and not soft.has_deadline
    assert read_targets(Headers(), "flex", TENANT, None).service_class == "batch"


@pytest.mark.parametrize(
    "value", ["", "0", "-5", "soon", "1e3", "inf", "3600001", "9" * 400, "0x10", "1,5", "٣"]
)
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-deadline-ms"])
def test_a_target_that_is_no_number_of_milliseconds_is_refused(name: str, value: str) -> None:
    for values in ([value], ["5", "6"]):
        headers = Headers(raw=[(name.encode(), value.encode()) for value in values])
        with pytest.raises(ApiError) as refused:
            read_targets(headers, "auto", TENANT, None)
        assert (refused.value.status, refused.value.param) == (400, name)


def test_a_tier_that_is_not_open_is_refused_by_name() -> None:
    tenant = Tenant(id="a", service_tiers=("default", "flex"))
    assert read_targets(Headers(), "auto", tenant, None).service_class == "default"
    with pytest.raises(ApiError, match=r"'priority'.*default, flex") as refused:
        read_targets(Headers(), "priority", tenant, None)
    assert (refused.value.status, refused.value.param) == (400, "service_tier")


def ticket() -> Ticket:
    return Ticket("r", 1, "a", 1.0, 100, 20)


def test_what_is_left_shrinks_on_the_way_and_while_asking_again() -> None:
    targets = Targets(ttft_ms=300.0, deadline_ms=2000.0, demotable=True)
    asked = targets.put_on(ticket(), elapsed_ms=40.0, output_tokens_bound=99)
    assert (asked.remaining_ttft_ms, asked.remaining_deadline_ms) == (260.0, 1960.0)
    assert asked.demotable and asked.output_tokens_bound == 99
    again = _aged(asked, 100.0)
    assert (again.remaining_ttft_ms, again.remaining_deadline_ms, again.age_ms) == (160.0, 1860.0, 100.0)
    assert Targets().put_on(ticket(), elapsed_ms=40.0, output_tokens_bound=99) == ticket()
    assert elapsed_when_asked(50.0, time.monotonic() - 0.03) == pytest.approx(20.0, abs=10.0)


def test_a_refused_deadline_names_the_earliest_one_from_the_clients_side() -> None:
    refusal = Refusal("r", 1, "deadline_unattainable", "the deadline cannot be promised: why", 130.2, 430.2)
    error = refusal_error(refusal, elapsed_ms=12.0)
    body = error.to_body()["error"]
    assert (error.status, body["code"], body["earliest_deadline_ms"]) == (503, "deadline_unattainable", 443)
    assert "443 ms" in body["message"]
    headers = error.headers()
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("1", "131")
    assert headers["x-should-retry"] == "false"
    never = refusal_error(Refusal("r", 1, "deadline_unattainable", "no", None, None), 1.0)
    assert "earliest_deadline_ms" not in never.to_body()["error"]
    late = refusal_error(Refusal("r", 1, "deadline_exceeded", "too late"), 1.0)
    assert (late.status, late.code) == (504, "deadline_exceeded")


def grant(**fields: Any) -> Grant:
    return Grant("r", 1, 1, "e", 1, 0.0, **fields)


def test_the_answer_says_what_became_of_the_deadline() -> None:
    targets = Targets(ttft_ms=1.0)
    assert targets.admission(grant(predicted_ttft_ms=5.0)) == "admitted"
    assert targets.admission(grant(demoted=True)) == "demoted"
    assert targets.admission(grant()) is None


def record(**fields: Any) -> RequestRecord:
    made = RequestRecord("r", "/v1/completions")
    made.tenant, made.model = "a", "m"
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_misses_count_over_all_that_was_offered() -> None:
    metrics = GatewayMetrics(["m"])
    cases: list[dict[str, Any]] = [
        {"ttft_target_ms": 100.0, "first_token_ms": 90.0, "admission": "admitted", "outcome": "ok"},
        {"ttft_target_ms": 100.0, "first_token_ms": 190.0, "admission": "admitted", "outcome": "ok"},
        {"ttft_target_ms": 100.0, "first_token_ms": 90.0, "admission": "demoted", "outcome": "ok"},
        {"ttft_target_ms": 100.0, "outcome": "refused", "error_code": "deadline_unattainable"},
        {"ttft_target_ms": 100.0, "outcome": "refused", "error_code": "deadline_exceeded"},
        {"deadline_ms": 500.0, "finished_ms": 400.0, "admission": "admitted", "outcome": "ok"},
        {"deadline_ms": 500.0, "finished_ms": 400.0, "outcome": "cancelled"},
        {"first_token_ms": 90.0, "outcome": "ok"},
    ]
    for case in cases:
        predicted = 95.0 if case.get("admission") == "admitted" else None
        metrics.observe(record(predicted_first_token_ms=predicted, **{"first_token_ms": None, **case}))
    text = metrics.render().decode()

    def count(admission: str, met: str) -> float:
        line = f'deadline_requests_total{{admission="{admission}",met="{met}",model="m",tenant="a"}} '
        found = [row for row in text.splitlines() if row.startswith(line)]
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    assert (count("admitted", "true"), count("admitted", "false")) == (2.0, 2.0)
    assert (count("demoted", "true"), count("refused", "false"), count("none", "false")) == (1.0, 1.0, 1.0)
    assert 'deadline_calibration_ratio{model="m"} 0.5' in text
