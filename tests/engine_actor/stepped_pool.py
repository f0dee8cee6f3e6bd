"""The real fair queue before one real scheduler; every step takes equally long."""

from __future__ import annotations

from collections import defaultdict

from engine_actor.executor import PAGE_SIZE
from engine_actor.report import engine_report
from engine_actor.request import EngineRequest, SamplingParams, StreamRow
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step_control import StepControl
from engine_actor.stub_runner import StubRunner
from policies.fair_queue import FairQueue, QueuePolicy
from policies.page_hashes import page_hashes
from policies.tickets import Grant, Ticket

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
        self.asked: defaultdict[str, int] = defaultdict(int)
        self.ended: defaultdict[str, int] = defaultdict(int)
        self._requests: dict[str, tuple[EngineRequest, float]] = {}
        self._accepted: list[tuple[str, int]] = []
        self._started: set[str] = set()

    def ask(
        self, tenant: str, tokens: int, output: int, predicted: int = 64, *, prompt: int | None = None
    ) -> None:
        """Requests with the same number of their `prompt` have the same text, others share nothing."""
        number = len(self._requests)
        name = f"{tenant}-{number}"
        text = number if prompt is None else -1 - prompt
        ids = [(text * 7919 + position * 31) % 50_000 for position in range(tokens)]
        request = EngineRequest(
            request=f"{name}/0",
            attempt=1,
            ticket=name,
            tenant=tenant,
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=output, temperature=0.0),
            namespace=tenant,
            predicted_output_tokens=predicted,
        )
        self._requests[name] = (request, self.now)
        self.asked[tenant] += 1
        hashes = () if prompt is None else self.hashes_of(tenant, ids)
        ticket = Ticket(name, 1, tenant, 1.0, tokens, predicted, page_hashes=hashes)
        assert self.queue.push(ticket, self.now) is None

    def live(self, tenant: str) -> int:
        """Requests that have been asked for and have not ended."""
        return self.asked[tenant] - self.ended[tenant]

    def submit(self, grant: Grant) -> None:
        self.scheduler.submit(self._requests[grant.request][0], self.now)
        self._accepted.append((grant.request, grant.attempt))

    def hashes_of(self, tenant: str, token_ids: list[int]) -> tuple[int, ...]:
        """What the ticket of a prompt says of its pages."""
        return page_hashes(tenant, token_ids, PAGE_SIZE)

    def step(self) -> None:
        report = engine_report("e0", self.scheduler, self.control, accepted=tuple(self._accepted))
        self._accepted.clear()
        self.queue.observe_report(report)
        while (grant := self.queue.next_grant(self.now)) is not None:
            self.submit(grant)
        record = self.scheduler.schedule(self.now)
        self.now += STEP_SECONDS
        for row in self.scheduler.take_finished():
            self._end(row)
        if record is None:
            return
        for row in self.scheduler.commit(record, self.runner.run(record), self.now):
            name = row.request.rpartition("/")[0]
            request, asked_at = self._requests[name]
            if row.token_ids and name not in self._started:
                self._started.add(name)
                self.steps_to_first[request.tenant].append(round((self.now - asked_at) / STEP_SECONDS))
            if row.finish_reason is not None:
                self._end(row)

    def _end(self, row: StreamRow) -> None:
        self.ended[self._requests[row.request.rpartition("/")[0]][0].tenant] += 1
