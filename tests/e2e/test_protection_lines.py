"""Protection lines on the real path, with the stub engine: what is given up under a line that is always crossed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

LONG_PROMPT = 16 * 64  # steps of the default token budget; the stub has bytes for tokens


@pytest.fixture(scope="module")
def guarded(start_server: Any) -> Iterator[Any]:
    def change(config: dict[str, Any]) -> None:
        user_config = config["applications"][0]["deployments"][0]["user_config"]
        user_config["slo"] = {"ttft_p95_ms": 0.001}

    with start_server("--engine", "stub", change=change) as server:
        yield server


def ask(server: Any, count: int = 1, length: int = 20, **fields: Any) -> list[Any]:
    body = {"model": server.model, "prompt": "x" * length, "max_tokens": 2, **fields}
    with server.http("alpha") as client:
        return [client.post("/v1/completions", json=body) for _ in range(count)]


def step(server: Any) -> float:
    return float(server.metric("protection_step"))


def go_down_to(server: Any, wanted: int) -> None:
    """One step for each 20 values: a percentile needs as many, and every step starts anew."""
    end = time.monotonic() + 60
    while step(server) < wanted:
        assert time.monotonic() < end, f"still at step {step(server)}"
        before = step(server)
        assert {answer.status_code for answer in ask(server, 20)} == {200}, "default work is never shed"
        with contextlib.suppress(AssertionError):
            server.wait_until(lambda before=before: step(server) > before, 5)
    assert step(server) == wanted


def test_batch_work_is_shed_first_then_long_prompts_and_nothing_else(guarded: Any) -> None:
    assert ask(guarded, service_tier="flex")[0].status_code == 200
    assert ask(guarded, length=LONG_PROMPT)[0].status_code == 200
    go_down_to(guarded, 1)
    (shed,) = ask(guarded, service_tier="flex")
    assert (shed.status_code, shed.json()["error"]["code"]) == (503, "overloaded")
    assert "ttft_p95_ms" in shed.json()["error"]["message"] and int(shed.headers["retry-after"]) >= 1
    refused = guarded.metric("admission_refusals_total", tenant="alpha", reason="overloaded")
    assert refused == 1
    assert ask(guarded, length=LONG_PROMPT)[0].status_code == 200

    go_down_to(guarded, 2)
    (shed,) = ask(guarded, length=LONG_PROMPT)
    assert (shed.status_code, shed.json()["error"]["code"]) == (503, "overloaded")
    assert ask(guarded, service_tier="priority")[0].status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_steps_back_one_at_a_time_when_all_is_well_again(guarded: Any) -> None:
    go_down_to(guarded, 2)
    # Nobody asks: the window of 15 s empties, and ten seconds below the line are a step back.
    guarded.wait_until(lambda: step(guarded) == 1, 60)
    assert ask(guarded, length=LONG_PROMPT)[0].status_code == 200
    assert ask(guarded, service_tier="flex")[0].status_code == 503
    guarded.wait_until(lambda: step(guarded) == 0, 60)
    assert ask(guarded, service_tier="flex")[0].status_code == 200
