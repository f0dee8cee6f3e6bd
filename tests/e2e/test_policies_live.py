"""Every order to compare with, and the habits of older engines, can be chosen in a config and serve."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from policies.fair_queue import QUEUE_POLICIES

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def check_service(server: Any) -> None:
    """Three tenants ask at the same time; everybody is answered in full, and counted."""

    def ask(tenant: str) -> tuple[str, int]:
        body = {"model": server.model, "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        with server.http(tenant) as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == 8
        return tenant, usage["prompt_tokens"] + 2 * usage["completion_tokens"]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, ["alpha", "beta", "patient"] * 8))
    # Prompt and answer together are less than a page: nothing of them can be found in the prefix cache.
    for tenant in ("alpha", "beta", "patient"):
        price = sum(cost for name, cost in answers if name == tenant)
        server.wait_until(lambda: server.metric("tenant_service_tokens_total", tenant=tenant) == price, 10)  # noqa: B023


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_a_policy_named_on_the_command_line_serves(start_server: Any, policy: str) -> None:
    with start_server("--engine", "stub", "--policy", policy) as server:
        check_service(server)


@pytest.mark.parametrize("habit", ["request_level_batching", "prefill_first"])
def test_a_habit_of_older_engines_can_be_switched_on(start_server: Any, habit: str) -> None:
    def change(config: dict[str, Any]) -> None:
        scheduler = config["applications"][0]["args"]["models"][0].setdefault("scheduler", {})
        scheduler.update({habit: True, "max_num_seqs": 4})

    with start_server("--engine", "stub", change=change) as server:
        check_service(server)
