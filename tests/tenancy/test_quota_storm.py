"""Many clients on several gateways against one small limit, on the real clock with a window of half a second."""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest
from conftest import PATIENT, demand, tenant, usage
from redis.asyncio import Redis

from tenancy.quota import Hold, QuotaStore, Used
from tenancy.redis import connect

pytestmark = pytest.mark.asyncio
WINDOW_US = 500_000
CLIENTS, GATEWAYS, LIMIT = 200, 3, 20
_ADMITTED = """
local times = {}
for _, packed in ipairs(redis.call('HVALS', KEYS[1])) do
  times[#times + 1] = string.format('%.0f', cmsgpack.unpack(packed)[1])
end
return times
"""


class QuickStore(QuotaStore):
    """A minute is half a second."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        for script in (self._reserve, self._settle, self._void, self._renew):
            assert "WINDOW, DAY = 60000000," in script.text
            script.text = script.text.replace("WINDOW, DAY = 60000000,", f"WINDOW, DAY = {WINDOW_US},")
            script.sha = hashlib.sha1(script.text.encode()).hexdigest()


async def storm(redis: Redis, url: str, seconds: float) -> None:
    await redis.flushall()
    clients = [connect(url + PATIENT) for _ in range(GATEWAYS)]
    stores = [QuickStore(client) for client in clients]
    who = tenant(requests_per_minute=LIMIT, tokens_per_day=10**9)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    holds: list[tuple[QuotaStore, Hold]] = []

    async def client(number: int) -> None:
        store, chance = stores[number % GATEWAYS], random.Random(number)
        while loop.time() < end:
            answer = await store.reserve(who, demand(input_tokens=40, output_tokens=10))
            if isinstance(answer, Hold):
                holds.append((store, answer))
                await asyncio.sleep(chance.random() * 0.02)
            else:
                assert answer.retry_after_ms is not None and 0 < answer.retry_after_ms <= WINDOW_US / 1000
                await asyncio.sleep(answer.retry_after_ms / 1000 if number % 2 else chance.random() * 0.05)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    admitted = sorted(int(t) for t in await redis.eval(_ADMITTED, 1, "eh:v2:{alpha}:holds"))
    assert len(admitted) == len(holds)
    for index, first in enumerate(admitted):
        within = sum(t < first + WINDOW_US for t in admitted[index:])
        assert within <= LIMIT, "a window saw more than the limit"
    assert len(admitted) > LIMIT, "and the limit could be used more than once"

    used = {hold.id: Used(40, 0, number % 25) for number, (_, hold) in enumerate(holds)}
    await asyncio.gather(*(store.settle(hold, used[hold.id]) for store, hold in holds))
    total = sum(u.input_tokens + u.output_tokens for u in used.values())
    counted = await usage(redis)
    assert counted["input"] + counted["output"] == total and counted["requests"] == len(holds)
    state = await redis.eval(
        "local b = cmsgpack.unpack(redis.call('HGET', KEYS[1], 'tenant/tokens_per_day')) return {b[2], b[3]}",
        1,
        "eh:v2:{alpha}:counts",
    )
    assert state == [total, 0]
    for store, redis_client in zip(stores, clients, strict=True):
        await store.aclose()
        await redis_client.aclose()


async def test_e01_e10_two_hundred_clients_on_three_gateways(redis: Redis, redis_url: str) -> None:
    for _ in range(2):
        await storm(redis, redis_url, 2.0)


@pytest.mark.slow
async def test_e01_e10_twenty_repeats(redis: Redis, redis_url: str) -> None:
    for _ in range(20):
        await storm(redis, redis_url, 3.0)
