"""Shares do not depend on which gateway a tenant's requests come through. Real actors, without HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from engine_actor.actor import EngineActor, EngineSpec
from engine_actor.build import EngineOptions
from engine_actor.request import EngineRequest, SamplingParams
from policies.tickets import Grant, Ticket
from serve_app.fair_queue import FairQueueActor, FairQueueSpec
from serve_app.owner import NAMESPACE
from serve_app.pool import ModelPool
from serve_app.text.model_text import stub_model_text

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SLOTS, INPUT, OUTPUT = 8, 20, 10
WEIGHTS = {"gold": 4.0, "basic": 1.0}
IN_FLIGHT = {"g0": {"gold": 28, "basic": 2}, "g1": {"gold": 2, "basic": 28}}
SECONDS = 20.0


@pytest.fixture
def actors() -> Iterator[Any]:
    """The handles of a fair queue and its engine."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
    )
    try:
        options = {"namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": 1000}
        engine_options = EngineOptions("", engine="stub", max_num_seqs=SLOTS)
        spec = FairQueueSpec(
            model="m",
            engines=("engine",),
            policy="vtc",
            locality_window=0.0,
            max_queued_requests=1000,
            max_queued_per_tenant=500,
            max_queued_tokens=10**6,
            max_queued_tokens_per_tenant=10**6,
            waiting_timeout_ms=60_000.0,
        )
        engine = ray.remote(EngineActor).options(name="engine", **options)
        queue = ray.remote(FairQueueActor).options(name="queue", **options)
        yield queue.remote(spec), engine.remote(EngineSpec("engine", "m", engine_options))
    finally:
        ray.shutdown()


async def keep_asking(pool: ModelPool, gateway: str, tenant: str, number: int) -> None:
    """One client: its next request when the last has ended."""
    loop, count = asyncio.get_running_loop(), 0
    while True:
        count += 1
        name = f"{gateway}-{tenant}-{number}-{count}"
        ticket = Ticket(name, 1, tenant, WEIGHTS[tenant], INPUT, OUTPUT)
        grant = await pool.ask_for_entry(ticket, loop.time(), 60.0)
        assert isinstance(grant, Grant), grant
        request = EngineRequest(
            f"{name}/0",
            1,
            name,
            tenant,
            list(range(INPUT)),
            SamplingParams(OUTPUT),
            namespace=name,  # nothing is cached
            weight=WEIGHTS[tenant],
            predicted_output_tokens=OUTPUT,
            queue_epoch=grant.queue_epoch,
        )
        mailbox = await pool.channels["engine"].submit([request], 1, grant.engine_epoch)
        while True:
            delivery = await mailbox.get(30.0)
            assert delivery is not None
            if delivery.rows[-1].finish_reason is not None:
                break


def test_two_gateways_with_skewed_arrivals_serve_four_to_one(actors: Any) -> None:
    """With deficits per router the same arrivals were served 163:162 (ai-dynamo/dynamo issue 15187)."""
    queue, engine = actors

    async def renew() -> None:
        while True:
            await asyncio.gather(queue.renew.remote("test"), engine.renew.remote("test"))
            await asyncio.sleep(1.0)

    async def served() -> dict[str, float]:
        tenants = (await queue.export_state.remote()).tenants
        return {tenant: tenants[tenant].served if tenant in tenants else 0.0 for tenant in WEIGHTS}

    async def scenario() -> dict[str, float]:
        tasks = [asyncio.create_task(renew())]
        pools = {
            name: ModelPool("m", (), stub_model_text(1000), "queue", ("engine",), name) for name in IN_FLIGHT
        }
        try:
            while not all(pool.ready for pool in pools.values()):
                await asyncio.sleep(0.1)
            tasks += [
                asyncio.create_task(keep_asking(pool, name, tenant, number))
                for name, pool in pools.items()
                for tenant, count in IN_FLIGHT[name].items()
                for number in range(count)
            ]
            await asyncio.sleep(3.0)
            before = await served()
            done, _ = await asyncio.wait(tasks, timeout=SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            after = await served()
            return {tenant: after[tenant] - before[tenant] for tenant in WEIGHTS}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for pool in pools.values():
                pool.stop()

    gained = asyncio.run(scenario())
    bound = SLOTS * (INPUT + 2 * OUTPUT)  # what an engine holds of one tenant
    assert sum(gained.values()) > 50 * bound, "too little was served to tell"
    assert gained["gold"] / gained["basic"] == pytest.approx(4.0, rel=0.03), gained
