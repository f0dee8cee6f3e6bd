"""How long a reservation and its settlement take: the real store, the real scripts, a real redis-server on loopback."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from typing import Any

from tenancy.embedded_redis import EmbeddedRedis
from tenancy.models import Limits, Price, Tenant
from tenancy.quota import Demand, Hold, QuotaStore, Used
from tenancy.redis import connect

LIMITS = Limits(
    requests_per_minute=1_000_000,
    tokens_per_minute=10**9,
    max_concurrent_requests=1000,
    tokens_per_day=10**11,
    cost_per_month=100_000,
)
LIMITS_PER_TENANT = 5
_DEMAND = Demand("bench", "m", input_tokens=200, output_tokens=64)
_USED = Used(200, 50, 80, timings={"queue": 1.0, "first_token": 50.0, "total": 900.0})


def run_quota(tenants: int, requests: int, seed: int = 0) -> dict[str, Any]:
    """Latencies in ms of `requests` reservations, one after the other, each of a random tenant.

    Every tenant has used its limits once before. `ping_ms` is the plain round trip of the same client, measured in
    turns with the rest: what no script can be faster than.
    """
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(folder) as server:
        return asyncio.run(_run(server.url, tenants, requests, seed))


async def _run(url: str, tenants: int, requests: int, seed: int) -> dict[str, Any]:
    client = connect(url + "?socket_timeout=10")
    store = QuotaStore(client, prices={"m": Price(input=0.1, output=0.4)})
    everyone = [Tenant(id=f"t{i}", limits=LIMITS) for i in range(tenants)]
    for start in range(0, tenants, 16):
        await asyncio.gather(*(_one(store, tenant) for tenant in everyone[start : start + 16]))
    chance = random.Random(seed)
    pings, reserves, settles = [], [], []
    for number in range(requests + requests // 10):
        tenant = chance.choice(everyone)
        begin = time.perf_counter()
        await client.ping()
        pinged = time.perf_counter()
        hold = await store.reserve(tenant, _DEMAND)
        reserved = time.perf_counter()
        assert isinstance(hold, Hold)
        await store.settle(hold, _USED)
        settled = time.perf_counter()
        if number >= requests // 10:  # the first ones warm up
            pings.append(pinged - begin)
            reserves.append(reserved - pinged)
            settles.append(settled - reserved)
    memory = (await client.info("memory"))["used_memory"]
    await store.aclose()
    await client.aclose()
    return {
        "reserve_ms": _figures(reserves),
        "settle_ms": _figures(settles),
        "ping_ms": _figures(pings),
        "tenants": tenants,
        "limits_per_tenant": LIMITS_PER_TENANT,
        "requests": requests,
        "redis_mb": round(memory / 2**20, 1),
    }


async def _one(store: QuotaStore, tenant: Tenant) -> None:
    hold = await store.reserve(tenant, _DEMAND)
    assert isinstance(hold, Hold)
    await store.settle(hold, _USED)


def _figures(seconds: list[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    return {
        name: round(1000 * ranked[min(len(ranked) - 1, int(len(ranked) * share))], 3)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
