"""Limits over three real gateways, and what is left of a gateway that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

GATEWAYS, CLIENTS, WORTH, REPEATS = 3, 200, 20, 20
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(start_server: Any) -> Iterator[Any]:
    def change(config: dict[str, Any]) -> None:
        gateway = config["applications"][0]["deployments"][0]
        gateway["num_replicas"] = GATEWAYS
        tenants = [
            {"id": "rated", "limits": {"requests_per_minute": WORTH}},
            {"id": "crash", "limits": {"max_concurrent_requests": 60, "tokens_per_day": 10**6}},
            *({"id": f"budget{i}", "limits": {"tokens_per_day": WORTH * tokens()}} for i in range(REPEATS)),
        ]
        gateway["user_config"]["tenants"] += [{**t, "api_keys": [f"eh_{t['id']}_test"]} for t in tenants]

    with start_server("--engine", "stub", change=change) as server:
        server.wait_until(lambda: len(gateways(server)) == GATEWAYS, 60)
        with client_of(server) as client:
            server.wait_until(lambda: client.zcard("eh:v2:gateways") == GATEWAYS, 60)
        yield server


def tokens() -> int:
    """What one request with BODY uses: measured once on the stub's tokenizer, which the first test checks."""
    return PROMPT_TOKENS + int(str(BODY["max_tokens"]))


PROMPT_TOKENS = 0  # set below


def gateways(server: Any) -> list[psutil.Process]:
    found = []
    for process in server.remember():
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::ServeReplica:evenhand:Gateway"):
            found.append(process)
    return found


def client_of(server: Any) -> redis.Redis:
    settings = server.redis_settings()
    return redis.Redis(port=int(settings["port"]), password=settings["requirepass"])
