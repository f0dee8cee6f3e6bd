"""Promised deadlines in virtual time, under overload and under what tenants may do to each other."""

from __future__ import annotations

from virtual_pool import VirtualPool

from policies.fair_queue import QueuePolicy

CHAT, CODE, SUMMARY = (200, 60), (600, 20), (1200, 80)


def overload(policy: QueuePolicy, *, demotable: bool = False) -> VirtualPool:
    """Twice what the pool can do: chat with 0.6 s to the first token, code with 2 s, summaries within 15 s."""
    pool = VirtualPool(policy, seed=3)
    pool.poisson("chat", 12.0, 0, 14, CHAT, ttft=0.6, service_class="interactive", demotable=demotable)
    pool.poisson("code", 7.5, 0, 14, CODE, ttft=2.0, demotable=demotable)
    pool.poisson("summary", 3.0, 0, 14, SUMMARY, deadline=15.0, demotable=demotable)
    pool.run()
    return pool


def test_under_twice_the_load_admitted_deadlines_are_kept() -> None:
    fair, first_come = overload("vtc"), overload("fcfs")
    assert fair.share_met(admitted=True) >= 0.95
    assert fair.share_met(admitted=False) >= 1.5 * first_come.share_met(admitted=False)
    assert fair.share_met(admitted=False) >= 0.4, "about half could be served at all"
    refused = [o for o in fair.offered.values() if o.refusal == "deadline_unattainable"]
    assert refused and all(o.first_token is None for o in refused)
    assert {o.refusal for o in fair.offered.values()} <= {None, "deadline_unattainable", "deadline_exceeded"}


def test_demoted_requests_are_served_and_cost_no_promise() -> None:
    pool = overload("vtc", demotable=True)
    assert pool.share_met(admitted=True) >= 0.95
    assert all(o.end is not None for o in pool.offered.values()), "nobody was refused or dropped"
    assert any(o.demoted for o in pool.offered.values())


def test_below_the_load_everybody_is_admitted() -> None:
    pool = VirtualPool(seed=4)
    pool.poisson("chat", 4.0, 0, 20, CHAT, ttft=1.0, service_class="interactive")
    pool.poisson("code", 2.5, 0, 20, CODE, ttft=3.0)
    pool.run()
    assert sum(o.admitted for o in pool.offered.values()) >= 0.97 * len(pool.offered)
    assert pool.share_met(admitted=True) >= 0.97


def test_promises_hold_when_a_quiet_tenant_returns_with_a_flood() -> None:
    pool = VirtualPool(seed=5)
    pool.poisson("alpha", 12.0, 0, 25, (400, 40), ttft=4.0)
    pool.poisson("beta", 0.3, 0, 10, (400, 40))
    pool.poisson("beta", 20.0, 10, 18, (400, 40))
    pool.run()
    assert pool.share_met("alpha", admitted=True) >= 0.95


def test_promises_hold_when_the_engine_becomes_slow() -> None:
    pool = VirtualPool(seed=6)
    pool.slowness = lambda now: 2.0 if 8 < now < 16 else 1.0
    pool.poisson("alpha", 6.0, 0, 25, (400, 40), ttft=2.0)
    pool.poisson("beta", 6.0, 0, 25, (400, 40), deadline=8.0)
    pool.run()
    assert pool.share_met(admitted=True) >= 0.95


def test_impossible_wishes_harm_nobody_else() -> None:
    pool = VirtualPool(seed=7)
    pool.poisson("liar", 20.0, 0, 15, (400, 40), ttft=0.02)
    pool.poisson("honest", 4.0, 0, 15, (400, 40), ttft=1.0)
    pool.run()
    assert all(o.refusal == "deadline_unattainable" for o in pool.offered.values() if o.tenant == "liar")
    assert pool.share_met("honest", admitted=False) >= 0.97


def test_a_started_request_is_never_dropped_for_being_late() -> None:
    pool = VirtualPool(seed=8)
    pool.slowness = lambda now: 30.0 if now > 2 else 1.0
    pool.poisson("a", 8.0, 0, 4, (300, 30), ttft=1.0)
    pool.run()
    late = [o for o in pool.offered.values() if o.first_token is not None and o.first_token > 1.0]
    assert late and all(o.end is not None and o.refusal is None for o in late)
    assert any(o.refusal == "deadline_exceeded" for o in pool.offered.values())
