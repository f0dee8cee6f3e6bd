"""The real fair queue before the real scheduler, in virtual time: who waits for how many steps."""

from __future__ import annotations

from collections import defaultdict

import pytest

from engine_actor.report import engine_report
from engine_actor.request import EngineRequest, SamplingParams
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step_control import StepControl
from engine_actor.stub_runner import StubRunner
from policies.fair_queue import FairQueue, QueuePolicy
from policies.tickets import Ticket

STEP_SECONDS = 0.02
SLOTS, BUDGET, PAGES = 16, 128, 4096


class World:
    """One queue, one engine. A step takes STEP_SECONDS whatever is in it."""

    def __init__(self, policy: QueuePolicy = "vtc", pages: int = PAGES) -> None:
        config = SchedulerConfig(SLOTS, BUDGET, max_model_len=4096, prefill_chunk_size=BUDGET)
        self.scheduler = Scheduler(config, pages + 1)
        self.control = StepControl(self.scheduler)
        self.runner = StubRunner(pages + 1, step_seconds=0.0, token_seconds=0.0)
        self.queue = FairQueue(
            queue_epoch=1, policy=policy, max_queued_requests=10_000, max_queued_per_tenant=5_000
        )
        self.now = 0.0
        self.steps_to_first: defaultdict[str, list[int]] = defaultdict(list)
        self.ended: defaultdict[str, int] = defaultdict(int)
        self._requests: dict[str, tuple[EngineRequest, float]] = {}
        self._accepted: list[tuple[str, int]] = []
        self._started: set[str] = set()

    def ask(self, tenant: str, tokens: int, output: int, predicted: int = 64) -> None:
        number = len(self._requests)
        name = f"{tenant}-{number}"
        ids = [(number * 7919 + position * 31) % 50_000 for position in range(tokens)]
        params = SamplingParams(max_tokens=output, temperature=0.0)
        request = EngineRequest(f"{name}/0", 1, name, tenant, ids, params, predicted_output_tokens=predicted)
        self._requests[name] = (request, self.now)
        assert self.queue.push(Ticket(name, 1, tenant, 1.0, tokens, predicted), self.now) is None

    def live(self, tenant: str) -> int:
        """Requests that have been asked for and have not ended."""
        asked = sum(request.tenant == tenant for request, _ in self._requests.values())
        return asked - self.ended[tenant]

    def step(self) -> None:
        report = engine_report("e0", self.scheduler, self.control, accepted=tuple(self._accepted))
        self._accepted.clear()
        self.queue.observe_report(report)
        while (grant := self.queue.next_grant(self.now)) is not None:
            self.scheduler.submit(self._requests[grant.request][0], self.now)
            self._accepted.append((grant.request, grant.attempt))
        record = self.scheduler.schedule(self.now)
        self.now += STEP_SECONDS
        if record is None:
            return
        for row in self.scheduler.commit(record, self.runner.run(record), self.now):
            name = row.request.rpartition("/")[0]
            request, asked_at = self._requests[name]
            if row.token_ids and name not in self._started:
                self._started.add(name)
                self.steps_to_first[request.tenant].append(round((self.now - asked_at) / STEP_SECONDS))
            if row.finish_reason is not None:
                self.ended[request.tenant] += 1


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
