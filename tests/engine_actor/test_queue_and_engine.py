"""The real fair queue before the real scheduler, in virtual time: who waits for how many steps."""

from __future__ import annotations

import pytest
from stepped_pool import PAGES, World

from policies.fair_queue import QueuePolicy


def beside_a_flood(policy: QueuePolicy, tokens: int, output: int, pages: int = PAGES) -> tuple[World, float]:
    """`alpha` keeps 64 requests going; `beta` asks for little every 75 steps. The world, and alpha's service."""
    world = World(policy, pages)
    for step in range(2000):
        for _ in range(64 - world.live("alpha")):
            world.ask("alpha", tokens, output)
        if step > 100 and step % 75 == 0:
            world.ask("beta", 32, 16)
        world.step()
    return world, world.scheduler.served["alpha"]


@pytest.mark.parametrize(("tokens", "output"), [(700, 64), (64, 512)])
def test_a_flood_costs_its_neighbour_a_few_steps(tokens: int, output: int) -> None:
    world, service = beside_a_flood("vtc", tokens, output)
    assert len(world.steps_to_first["beta"]) >= 24
    assert max(world.steps_to_first["beta"]) <= 3, "the step in flight, one to get in, one for the prompt"
    other, unhindered = beside_a_flood("fcfs", tokens, output)
    waits = other.steps_to_first["beta"]
    assert not waits or max(waits) > 30, "without rights it waits for a slot, and for all who asked before"
    assert service >= 0.9 * unhindered


def test_long_prompts_on_every_page_do_not_lock_a_tenant_out() -> None:
    world, _ = beside_a_flood("vtc", 900, 400, pages=700)
    assert len(world.steps_to_first["beta"]) >= 24
    assert max(world.steps_to_first["beta"]) <= 4


def test_two_floods_share_the_engine_whatever_their_shapes() -> None:
    """Long generations against long prompts: equal service, though the one needs most of the slots."""
    world = World()
    for _ in range(4000):
        for tenant, tokens, output in (("talks", 32, 256), ("reads", 900, 8)):
            for _ in range(32 - world.live(tenant)):
                world.ask(tenant, tokens, output, predicted=output)
        world.step()
    talks, reads = world.scheduler.served["talks"], world.scheduler.served["reads"]
    assert talks / reads == pytest.approx(1.0, abs=0.1)
