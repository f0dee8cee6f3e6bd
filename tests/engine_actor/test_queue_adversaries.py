"""A tenant that plays with cancellation or with the price of cached tokens gains nothing and takes nothing away."""

from __future__ import annotations

from typing import Literal

import pytest
from stepped_pool import PAGES, World

from policies.tickets import Grant

STEPS = 500
Moment = Literal["before it is submitted", "before its first step", "after its first step"]


class Quitter(World):
    """Requests of `quits` are given up as soon as they have been granted."""

    moment: Moment = "before it is submitted"

    def submit(self, grant: Grant) -> None:
        if not grant.request.startswith("quits"):
            super().submit(grant)
            return
        self.quitting.append(grant)
        if self.moment == "before it is submitted":
            self.ended["quits"] += 1
        else:
            super().submit(grant)
        if self.moment != "after its first step":
            self.quit()

    def step(self) -> None:
        super().step()
        self.quit()

    def quit(self) -> None:
        for grant in self.quitting:
            self.queue.withdraw(grant.request, grant.attempt)
            self.scheduler.abort(f"{grant.request}/0", 1)
        self.quitting.clear()

    def beside(self, quitters: int) -> float:
        """The service of `usual`, which keeps 48 requests going beside so many of `quits`."""
        self.quitting: list[Grant] = []
        for _ in range(STEPS):
            for _ in range(quitters - self.live("quits")):
                self.ask("quits", 600, 64)
            for _ in range(48 - self.live("usual")):
                self.ask("usual", 100, 64)
            self.step()
        return self.scheduler.served["usual"]


@pytest.mark.parametrize(
    ("moment", "least"),
    [("before it is submitted", 0.95), ("before its first step", 0.9), ("after its first step", 0.45)],
)
def test_cancelling_right_after_the_grant_wins_no_share_and_leaves_nothing_booked(
    moment: Moment, least: float
) -> None:
    alone = Quitter().beside(0)
    world = Quitter()
    world.moment = moment
    assert world.beside(32) >= least * alone
    assert world.scheduler.served.get("quits", 0.0) <= 1.1 * world.scheduler.served["usual"]
    while len(world.queue) or world.scheduler.has_work:
        world.step()
    world.step()  # the last report
    for tenant, snapshot in world.queue.snapshot().items():
        assert (snapshot.booked, snapshot.queued) == (0.0, 0), tenant
    assert world.scheduler.state.unclaimed_pages() == world.scheduler.cache.total
    world.scheduler.cache.check_idle()


def shared_by_two(world: World, thief_prompts: int | None) -> tuple[float, float]:
    """Computed work (input, and output twice) of `thief`, whose prompts are so many, and of `honest`."""
    for step in range(STEPS):
        for index in range(32 - world.live("thief")):
            prompt = None if thief_prompts is None else (step + index) % thief_prompts
            world.ask("thief", 400, 16, predicted=16, prompt=prompt)
        for _ in range(32 - world.live("honest")):
            world.ask("honest", 400, 16, predicted=16)
        world.step()
    hits = {name: counters.hit_tokens for name, counters in world.scheduler.state.prefix_counters().items()}
    served = world.scheduler.served
    return served["thief"] - 0.1 * hits["thief"], served["honest"] - 0.1 * hits["honest"]


def test_prompts_that_are_really_cached_take_no_more_than_half_of_the_computing() -> None:
    world = World()
    thief, honest = shared_by_two(world, thief_prompts=3)
    assert world.scheduler.state.prefix_counters()["thief"].hit_tokens > 20_000
    assert thief <= 1.05 * honest


class Boaster(World):
    """Tickets of `thief` name the pages of one cached prompt, whatever their own text is."""

    def hashes_of(self, tenant: str, token_ids: list[int]) -> tuple[int, ...]:
        self.claimed = getattr(self, "claimed", None) or super().hashes_of(tenant, token_ids)
        return self.claimed


def test_prompts_that_only_look_cached_are_charged_what_is_computed() -> None:
    # So many texts that none is in the cache when it comes again.
    world = Boaster(pages=1024)
    thief, honest = shared_by_two(world, thief_prompts=1_000_000)
    assert thief == pytest.approx(honest, rel=0.1)
    assert world.queue.snapshot()["thief"].served == pytest.approx(world.scheduler.served["thief"], rel=0.05)


def test_a_prefix_of_another_tenant_is_not_priced_as_cached() -> None:
    world = World()
    world.ask("honest", 400, 8, prompt=1)
    while world.scheduler.has_work or len(world.queue):
        world.step()
    world.step()
    assert world.scheduler.state.unclaimed_pages() == PAGES
    booked = {}
    for tenant in ("honest", "thief"):
        world.ask(tenant, 400, 8, predicted=8, prompt=1)
        grant = world.queue.next_grant(world.now)
        assert grant is not None
        booked[tenant] = world.queue.snapshot()[tenant].booked
        world.submit(grant)
    assert booked["honest"] == pytest.approx(0.1 * 384 + 16 + 2 * 8)
    assert booked["thief"] == 400 + 2 * 8
    while world.scheduler.has_work:
        world.step()
    assert world.scheduler.state.prefix_counters()["thief"].hit_tokens == 0
    assert world.scheduler.served["thief"] == 400 + 2 * 8
