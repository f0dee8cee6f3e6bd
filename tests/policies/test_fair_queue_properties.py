"""Invariants of the fair queue under any order of calls, checked against a simple model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.fair_queue import QUEUE_POLICIES, FairQueue, QueuePolicy
from policies.latency_model import StepEstimate
from policies.tickets import EngineReport, Grant, ServiceClass, Ticket

TENANTS = st.sampled_from(["a", "b", "c"])
ENGINES = st.sampled_from(["e0", "e1"])
REQUESTS = st.integers(0, 14)
MAX_QUEUED, MAX_PER_TENANT = 8, 4
MAX_TOKENS, MAX_TENANT_TOKENS = 1500, 700


class FairQueueMachine(RuleBasedStateMachine):
    """Model: which attempt of each request waits, which grants are in flight, what each engine has served."""

    @initialize(policy=st.sampled_from(QUEUE_POLICIES), window=st.sampled_from([0.0, 300.0]))
    def start(self, policy: QueuePolicy, window: float) -> None:
        self.queue = FairQueue(
            queue_epoch=1,
            policy=policy,
            max_queued_requests=MAX_QUEUED,
            max_queued_per_tenant=MAX_PER_TENANT,
            max_queued_tokens=MAX_TOKENS,
            max_queued_tokens_per_tenant=MAX_TENANT_TOKENS,
            locality_window=window,
        )
        self.now = 100.0
        self.waiting: dict[str, Ticket] = {}
        self.in_flight: dict[str, tuple[Grant, float]] = {}
        self.pushes: dict[tuple[str, int], int] = {}
        self.grants: dict[tuple[str, int], int] = {}
        self.epochs = {"e0": 1, "e1": 1}
        self.steps = {"e0": 0, "e1": 0}
        self.served: dict[str, dict[str, float]] = {"e0": {}, "e1": {}}
        self.counted: dict[tuple[str, int], dict[str, float]] = {}  # last report by engine and epoch
        self.counters: dict[str, float] = {}

    def expire_model(self) -> None:
        self.in_flight = {r: (g, t) for r, (g, t) in self.in_flight.items() if t + 2.0 > self.now}

    @rule(
        number=REQUESTS,
        attempt=st.integers(0, 2),
        weight=st.sampled_from([0.5, 1.0, 4.0, 1e-6, 1e12]),
        kv_share=st.sampled_from([1.0, 0.1, 0.6]),
        sequences=st.integers(1, 3),
        service_class=st.sampled_from(["interactive", "default", "batch"]),
        deadline=st.none() | st.floats(-100.0, 9000.0),
        demotable=st.booleans(),
        age=st.floats(0.0, 5000.0),
    )
    def push(
        self,
        number: int,
        attempt: int,
        weight: float,
        kv_share: float,
        sequences: int,
        service_class: ServiceClass,
        deadline: float | None,
        demotable: bool,
        age: float,
    ) -> None:
        request, tenant, tokens = f"r{number}", "abc"[number % 3], number * 37 % 300
        ticket = Ticket(
            request,
            attempt,
            tenant,
            weight,
            tokens,
            tokens // 3,
            sequences,
            service_class,
            remaining_deadline_ms=deadline,
            demotable=demotable,
            age_ms=age,
            kv_share=kv_share,
            page_hashes=(number % 4, number % 5),
        )
        known = self.waiting.get(request)
        known_attempt = known.attempt if known else -1
        if request in self.in_flight:
            known_attempt = self.in_flight[request][0].attempt
        refusal = self.queue.push(ticket, self.now)
        if attempt < known_attempt:
            assert refusal is None
            return
        self.in_flight.pop(request, None)
        if refusal is None:
            self.waiting[request] = ticket
            key = (request, attempt)
            self.pushes[key] = self.pushes.get(key, 0) + 1
        elif refusal.code == "deadline_unattainable":
            assert deadline is not None and not demotable and self.queue.policy in ("vtc", "lcf")
            assert refusal.earliest_deadline_ms is None or refusal.earliest_deadline_ms >= age + deadline
            self.waiting.pop(request, None)
        else:
            held = sum(t.tenant == tenant for t in self.waiting.values())
            assert refusal.code == "queue_full" and request not in self.waiting
            own = sum(t.input_tokens for t in self.waiting.values() if t.tenant == tenant)
            free = MAX_TOKENS - sum(t.input_tokens for t in self.waiting.values())
            assert (
                held == MAX_PER_TENANT
                or held >= MAX_QUEUED - len(self.waiting)
                or own + tokens > MAX_TENANT_TOKENS
                or tokens > free
                or own >= free
            )

    @rule(number=REQUESTS, attempt=st.integers(0, 2))
    def withdraw(self, number: int, attempt: int) -> None:
        request = f"r{number}"
        waits = request in self.waiting and self.waiting[request].attempt <= attempt
        flies = request in self.in_flight and self.in_flight[request][0].attempt <= attempt
        assert self.queue.withdraw(request, attempt) == (waits or flies)
        if waits:
            del self.waiting[request]
        if flies:
            del self.in_flight[request]

    @rule()
    def grant(self) -> None:
        grant = self.queue.next_grant(self.now)
        self.expire_model()
        if grant is None:
            return
        ticket = self.waiting.pop(grant.request)
        assert grant.attempt == ticket.attempt and grant.queue_epoch == 1
        assert grant.engine_epoch == self.epochs[grant.engine]
        key = (grant.request, grant.attempt)
        self.grants[key] = self.grants.get(key, 0) + 1
        assert self.grants[key] <= self.pushes[key], "one grant per push at most"
        self.in_flight[grant.request] = (grant, self.now)

    @rule(seconds=st.floats(0.0, 1.5) | st.just(7200.0))  # a machine may sleep for hours
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def break_promises(self) -> None:
        for refusal in self.queue.break_promises(self.now):
            ticket = self.waiting.pop(refusal.request)
            assert refusal.code == "deadline_exceeded" and refusal.attempt == ticket.attempt
            assert ticket.remaining_deadline_ms is not None and not ticket.demotable
        # What was demoted waits again: one more push of the same attempt.
        for request, entry in self.queue._entries.items():
            if entry.ticket.demoted and not self.waiting[request].demoted:
                self.waiting[request] = entry.ticket

    @rule(timeout_ms=st.floats(0.0, 8000.0))
    def expire(self, timeout_ms: float) -> None:
        for ticket in self.queue.expire(self.now, timeout_ms):
            assert self.waiting.pop(ticket.request).attempt == ticket.attempt

    @rule(
        engine=ENGINES,
        work=st.dictionaries(TENANTS, st.floats(0.0, 1000.0)),
        outstanding=st.dictionaries(TENANTS, st.floats(0.0, 1000.0)),
        running=st.integers(0, 6),
        prefill=st.integers(0, 300),
        free=st.integers(0, 100),
        lost=st.booleans(),
        accept=st.booleans(),
        draining=st.booleans(),
    )
    def report(
        self,
        engine: str,
        work: dict[str, float],
        outstanding: dict[str, float],
        running: int,
        prefill: int,
        free: int,
        lost: bool,
        accept: bool,
        draining: bool,
    ) -> None:
        self.steps[engine] += 1
        for tenant, amount in work.items():
            self.served[engine][tenant] = self.served[engine].get(tenant, 0.0) + amount
        accepted = [
            (r, g.attempt)
            for r, (g, _) in self.in_flight.items()
            if accept and not lost and g.engine == engine
        ]
        if not lost:
            self.deliver(engine, outstanding, running, prefill, free, accepted, draining)
            for request, _ in accepted:
                del self.in_flight[request]

    @precondition(lambda self: any(engine == "e0" for engine, _ in self.counted))
    @rule(tenant=TENANTS)
    def late_report(self, tenant: str) -> None:
        """A report of an earlier step that claims absurd service."""
        before = self.queue.snapshot()
        self.queue.observe_report(
            self.make_report("e0", {tenant: 1e9}, step=-1, served={tenant: 1e12}),
        )
        assert self.queue.snapshot() == before

    @rule(engine=ENGINES)
    def restart(self, engine: str) -> None:
        """A new epoch starts from zero; a report of the old one that comes late changes nothing."""
        last_words = self.make_report(engine, {"a": 5.0}, running=1)
        self.deliver(engine)
        self.epochs[engine] += 1
        self.steps[engine] = 0
        self.served[engine] = {}
        self.deliver(engine)
        self.in_flight = {r: (g, t) for r, (g, t) in self.in_flight.items() if g.engine != engine}
        before = self.queue.snapshot()
        self.queue.observe_report(last_words)
        assert self.queue.snapshot() == before

    @rule(engine=ENGINES)
    def forget(self, engine: str) -> None:
        self.queue.forget_engine(engine)
        self.in_flight = {r: (g, t) for r, (g, t) in self.in_flight.items() if g.engine != engine}

    @rule()
    def succeed(self) -> None:
        """The queue dies. Its successor gets the counters, and the gateways ask again for all that waits."""
        old, state = self.queue, self.queue.export_state()
        self.queue = FairQueue(
            queue_epoch=1,
            policy=old.policy,
            max_queued_requests=MAX_QUEUED,
            max_queued_per_tenant=MAX_PER_TENANT,
            max_queued_tokens=MAX_TOKENS,
            max_queued_tokens_per_tenant=MAX_TENANT_TOKENS,
        )
        self.queue.restore(state, self.now)
        self.in_flight = {}
        before = {tenant: seen.served for tenant, seen in old.snapshot().items()}
        assert {tenant: seen.served for tenant, seen in self.queue.snapshot().items()} == before
        places = {name: tenant.counter for name, tenant in old._accounts.tenants.items()}
        asking, self.waiting = self.waiting, {}
        for ticket in sorted(asking.values(), key=lambda ticket: -ticket.age_ms):
            # A threshold may refuse what had got in earlier, in another order.
            if self.queue.push(ticket, self.now) is None:
                self.waiting[ticket.request] = ticket
                key = (ticket.request, ticket.attempt)
                self.pushes[key] += 1
        for ticket in self.waiting.values():
            assert self.queue._accounts.tenants[ticket.tenant].counter == places[ticket.tenant]

    def deliver(self, engine: str, *args: Any) -> None:
        self.queue.observe_report(self.make_report(engine, *args))
        self.counted[engine, self.epochs[engine]] = dict(self.served[engine])

    def make_report(
        self,
        engine: str,
        outstanding: dict[str, float] | None = None,
        running: int = 0,
        prefill: int = 0,
        free: int = 100,
        accepted: Sequence[tuple[str, int]] = (),
        draining: bool = False,
        *,
        step: int | None = None,
        served: dict[str, float] | None = None,
    ) -> EngineReport:
        return EngineReport(
            engine=engine,
            engine_epoch=self.epochs[engine],
            step=self.steps[engine] if step is None else step,
            served=dict(self.served[engine]) if served is None else served,
            outstanding=outstanding or {},
            running=running,
            waiting=0,
            waiting_prefill_tokens=prefill,
            max_num_seqs=6,
            max_num_batched_tokens=100,
            free_pages=free,
            total_pages=100,
            page_size=16,
            accepted=tuple(accepted),
            draining=draining,
            live_sequences={"a": running // 2, "b": running - running // 2},
            tenant_pages={"a": (100 - free) // 2},
            tenant_prefill_tokens={"a": prefill},
            remaining=((running, 100 - free),) * min(running, 1),
            step_estimate=StepEstimate(1e-3, 1e-5, 1e-4, 0.0, 0.0, 0.1) if self.steps[engine] % 7 else None,
            page_hashes_added=(self.steps[engine] % 5,),
            page_hashes_removed=((self.steps[engine] + 2) % 5,),
        )

    @invariant()
    def queue_holds_what_the_model_holds(self) -> None:
        state = self.queue.snapshot()
        assert len(self.queue) == len(self.waiting) <= MAX_QUEUED
        for tenant in "abc":
            queued = sum(ticket.tenant == tenant for ticket in self.waiting.values())
            assert (state[tenant].queued if tenant in state else 0) == queued <= MAX_PER_TENANT

    @invariant()
    def counters_never_fall_and_nothing_is_booked_below_zero(self) -> None:
        for tenant, state in self.queue.snapshot().items():
            assert state.booked >= 0.0
            counter = state.key - state.booked / state.weight
            assert counter >= self.counters.get(tenant, 0.0) - 1e-6
            self.counters[tenant] = max(counter, self.counters.get(tenant, 0.0))

    @invariant()
    def service_is_counted_once(self) -> None:
        for tenant, state in self.queue.snapshot().items():
            total = sum(served.get(tenant, 0.0) for served in self.counted.values())
            assert math.isclose(state.served, total, abs_tol=1e-6)

    @invariant()
    def promises_are_those_of_waiting_tickets(self) -> None:
        table = self.queue._admission._table
        promised = table.requests(table.due > -math.inf)
        assert len(promised) == len(set(promised)) == len(table)
        for request in promised:
            promise, entry = table.get(request), self.queue._entries[request]
            assert promise is not None and promise.due == entry.rank and not entry.ticket.demoted

    @invariant()
    def every_ticket_stands_in_its_queue_once(self) -> None:
        queue = self.queue
        tenants = queue._accounts.tenants.values()
        listed = [entry for tenant in tenants for lane in tenant.lanes.values() for entry in lane]
        assert sorted(e.ticket.request for e in listed) == sorted(self.waiting)
        for tenant in tenants:
            assert all(lane == sorted(lane) and lane for lane in tenant.lanes.values())
            assert tenant.queued == sum(len(lane) for lane in tenant.lanes.values())
        tokens = sum(ticket.input_tokens for ticket in self.waiting.values())
        assert queue._queued_tokens == sum(tenant.queued_tokens for tenant in tenants) == tokens
        assert tokens <= MAX_TOKENS
        waiting = [tenant for tenant in tenants if tenant.queued]
        assert queue._waiting.count == len(waiting)
        assert queue._waiting.weight == math.fsum(tenant.weight for tenant in waiting)
        assert queue._waiting.kv_share == math.fsum(tenant.kv_share for tenant in waiting)

    @invariant()
    def the_order_offers_what_waits_and_each_ticket_once(self) -> None:
        front = self.queue._order.front(self.now, 100)
        assert len({entry.ticket.request for entry in front}) == len(front)
        assert {entry.ticket.request for entry in front} <= self.waiting.keys()
        if self.waiting and self.queue.policy != "rpm":
            assert front and front[0] == self.queue._order.front(self.now, 1)[0]

    def teardown(self) -> None:
        """An engine that takes everything gets what waits: each request once, in its latest attempt."""
        if not hasattr(self, "queue"):
            return
        self.queue.forget_engine("e1")
        self.now += 1e9  # past every rate limit
        self.steps["e0"] += 1
        report = self.make_report("e0")
        self.queue.observe_report(
            replace(
                report, max_num_seqs=10**6, max_num_batched_tokens=10**6, free_pages=10**6, total_pages=10**7
            )
        )
        granted: dict[str, int] = {}
        while (grant := self.queue.next_grant(self.now)) is not None:
            assert grant.request not in granted
            granted[grant.request] = grant.attempt
            self.now += 1e9
        assert granted == {request: ticket.attempt for request, ticket in self.waiting.items()}


FairQueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFairQueue = FairQueueMachine.TestCase
