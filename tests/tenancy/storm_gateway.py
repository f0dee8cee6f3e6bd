"""One gateway of a storm, in a process of its own: reserves and settles until its work is done or it is killed.

    python storm_gateway.py URL NAME REQUESTS CONCURRENCY LOG

For each request it writes what it will charge to LOG before it settles, and `done` after.
"""

from __future__ import annotations

import asyncio
import random
import sys

from tenancy.models import Limits, Price, Tenant
from tenancy.quota import Demand, Hold, QuotaStore, Used
from tenancy.redis import connect

TENANTS = [
    Tenant(
        id=f"storm{i}", limits=Limits(max_concurrent_requests=100, tokens_per_day=10**9, cost_per_month=1000)
    )
    for i in range(3)
]
PRICES = {"m": Price(input=0.123, cached_input=0.05, output=0.77)}
LEASE_MS = 2000


async def main(url: str, name: str, requests: int, concurrency: int, path: str) -> None:
    store = QuotaStore(
        connect(url + "?socket_timeout=20&socket_connect_timeout=20"), prices=PRICES, lease_ms=LEASE_MS
    )
    live: dict[str, Hold] = {}
    turns = asyncio.Semaphore(concurrency)
    chance = random.Random(name)

    async def renew() -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 3000)
            await store.renew(list(live.values()))

    with open(path, "w", buffering=1) as log:

        async def one(number: int) -> None:
            async with turns:
                tenant = TENANTS[number % 3]
                demand = Demand(f"{name}-{number}", "m", input_tokens=50, output_tokens=60)
                hold = await store.reserve(tenant, demand)
                if not isinstance(hold, Hold):
                    return
                live[hold.id] = hold
                await asyncio.sleep(chance.random() * 0.2)
                used = Used(
                    50, chance.randrange(50), chance.randrange(120), chance.choice(["ok", "cancelled"])
                )
                print(hold.demand.request_id, tenant.id, *_numbers(used), file=log)
                del live[hold.id]
                if number % 10 == 9:
                    await store.void(hold)
                    print(hold.demand.request_id, "void", file=log)
                    return
                await store.settle(hold, used)
                if number % 7 == 0:
                    await store.settle(hold, used)
                print(hold.demand.request_id, "done", file=log)

        renewal = asyncio.create_task(renew())
        await asyncio.gather(*(one(number) for number in range(requests)))
        renewal.cancel()
    await store.aclose()


def _numbers(used: Used) -> tuple[int, int, int, int]:
    price = PRICES["m"].nano(used.input_tokens, used.cached_tokens, used.output_tokens)
    return used.input_tokens, used.cached_tokens, used.output_tokens, price


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
