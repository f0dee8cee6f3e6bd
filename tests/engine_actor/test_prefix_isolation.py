"""D01: the time to the first token tells nothing about what another tenant has in the prefix cache.

Real scheduler and cache, real time; the runner takes time by the token, as prefill does. An attacker knows the secret
prefix and asks whether somebody has sent it: of each pair one prompt begins with what the victim has just sent, one
with tokens that nobody has. The area under the ROC curve of the two times is 0.5 where they tell nothing.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import numpy as np

from engine_actor.executor import PAGE_SIZE, ExecutorInfo, Runner
from engine_actor.request import EngineRequest, SamplingParams
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepRecord, StepResult

PREFIX = 4 * PAGE_SIZE
ITEM = np.ones((24, 24), np.float32)


class PacedRunner(Runner):
    """Computes something for every token, so that a step takes time by the token and no timer is involved."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.info = ExecutorInfo("test", "none", "cpu", "none", "none", 1)

    def run(self, record: StepRecord) -> StepResult:
        for _ in range(record.num_tokens):
            np.dot(ITEM, ITEM)
        rows = int(np.count_nonzero(record.is_last_chunk))
        return StepResult(record.step, np.zeros(rows, np.int32), np.ones(rows, np.bool_), 0.0)


class Engine:
    def __init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512, prefill_chunk_size=256
        )
        self.runner = PacedRunner(400)
        self.scheduler = Scheduler(config, self.runner.num_pages)
        self.template = EngineRequest(
            request="",
            attempt=1,
            ticket="",
            tenant="",
            namespace="",
            weight=1.0,
            prompt_token_ids=[],
            sampling=SamplingParams(1, temperature=0.0),
        )
        self.count = 0

    def ask(self, tenant: str, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and cached tokens as the tenant is told."""
        self.count += 1
        name = str(self.count)
        request = replace(
            self.template, request=name, ticket=name, tenant=tenant, namespace=tenant, prompt_token_ids=prompt
        )
        begin = time.perf_counter()
        self.scheduler.submit(request, 0.0)
        cached = 0
        while self.scheduler.has_work:
            record = self.scheduler.schedule(0.0)
            rows = self.scheduler.take_finished()
            if record is not None:
                rows += self.scheduler.commit(record, self.runner.run(record), 0.0)
            cached += sum(row.usage.cached_input for row in rows if row.usage is not None)
        return time.perf_counter() - begin, cached


def area(first: list[float], second: list[float]) -> float:
    """Probability that a time of `first` is below one of `second` (Mann and Whitney's U over all pairs)."""
    ranks = np.argsort(np.argsort(np.array(first + second))) + 1
    above = ranks[len(first) :].sum() - len(second) * (len(second) + 1) / 2
    return float(above / (len(first) * len(second)))


def test_D01_no_time_of_the_engine_tells_of_another_tenants_prefix() -> None:
    """The whole path is looked at by a longer test of the same name, in tests/e2e."""
    engine, rng, pairs = Engine(), random.Random(11), 500

    def fresh() -> list[int]:
        return [rng.randrange(1000) for _ in range(PREFIX)] + [1]

    times: dict[str, list[float]] = {name: [] for name in ("theirs", "nobody's", "own", "new")}
    for _ in range(pairs):
        secret = fresh()
        engine.ask("victim", secret)
        trials = [("theirs", "attacker", secret), ("nobody's", "attacker", fresh())]
        trials += [("own", "victim", secret), ("new", "victim", fresh())]
        rng.shuffle(trials)
        for name, tenant, prompt in trials:
            seconds, cached = engine.ask(tenant, prompt)
            times[name].append(seconds)
            assert cached == (PREFIX if name == "own" else 0)
    # The standard error of the area under equal distributions; at four of it a sound cache fails once in 16,000 runs.
    margin = 4 * math.sqrt((2 * pairs + 1) / (12 * pairs * pairs))
    assert abs(area(times["theirs"], times["nobody's"]) - 0.5) < margin
    assert area(times["own"], times["new"]) > 0.8, "the tenant's own prefix is served from the cache"
