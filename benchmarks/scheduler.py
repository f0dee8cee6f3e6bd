"""What the scheduler itself costs: a closed loop of requests over a model that computes nothing.

Steady state: whenever a request ends, the next one arrives, so `running` requests run at every step. Prompts are
unique, so each is inserted into the radix tree in full and older ones are evicted; tables grow by a page every 16
tokens. Counted are submit, schedule and commit, in CPU time of the thread: a busy neighbour does not change it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engine_actor.kv.cache import pages_for
from engine_actor.request import EngineRequest, SamplingParams
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step import StepRecord, StepResult

PROMPT_TOKENS = (64, 512)
OUTPUT_TOKENS = (64, 384)
TENANTS = 8
PREFILL_TOKENS_PER_STEP = 512
_VOCABULARY = 50_000


def measure(running: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """Run `steps` steps at `running` requests after a warm-up of 400 steps.

    Returns running (mean requests in the running set), us_per_step (mean), us_per_request (the mean per running
    request), us_per_step_median, us_per_step_p99, tree_us_per_step (mean inside the KV cache and its radix tree, from
    as many steps more with a clock around each call, whose own cost is taken off), finished_per_step, steps.
    """
    load = _Load(running, seed)
    for _ in range(400):
        load.step()
    gc.collect()
    load.reset()
    each: list[float] = []
    for _ in range(steps):
        before = load.seconds
        load.step()
        each.append((load.seconds - before) * 1e6)
    per_step = load.seconds / steps * 1e6
    mean_running, finished = load.running / steps, load.finished / steps
    load.time_cache()
    for _ in range(steps):
        load.step()
    return {
        "running": round(mean_running, 1),
        "us_per_step": round(per_step, 1),
        "us_per_request": round(per_step / mean_running, 3),
        "us_per_step_median": round(statistics.median(each), 1),
        "us_per_step_p99": round(float(np.percentile(each, 99)), 1),
        "tree_us_per_step": round(load.cache_seconds / steps * 1e6, 1),
        "finished_per_step": round(finished, 2),
        "steps": steps,
    }


class _Load:
    def __init__(self, running: int, seed: int) -> None:
        self._random = random.Random(seed)
        longest = PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
        config = SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=running + PREFILL_TOKENS_PER_STEP,
            max_model_len=longest + 1,
            prefill_chunk_size=PREFILL_TOKENS_PER_STEP,
        )
        self._scheduler = Scheduler(config, running * pages_for(longest) * 5 // 4)
        self._names = 0
        self.reset()
        for _ in range(running):
            self._submit(first=True)

    def reset(self) -> None:
        self.seconds = self.cache_seconds = 0.0
        self.running = self.finished = 0

    def step(self) -> None:
        scheduler = self._scheduler
        begin = time.thread_time()
        record = scheduler.schedule(0.0)
        self.seconds += time.thread_time() - begin
        assert record is not None
        result = _null_result(record)
        begin = time.thread_time()
        rows = scheduler.commit(record, result, 0.0)
        ended = sum(row.finish_reason is not None for row in rows)
        self.seconds += time.thread_time() - begin
        self.running += scheduler.num_running
        self.finished += ended
        for _ in range(ended):
            self._submit()

    def _submit(self, first: bool = False) -> None:
        """A request of random size; the first ones end at random moments, as if they ran for a while."""
        rng = self._random
        output = rng.randint(1 if first else OUTPUT_TOKENS[0], OUTPUT_TOKENS[1])
        self._names += 1
        name = f"r{self._names}"
        request = EngineRequest(
            request=name,
            attempt=1,
            ticket=name,
            tenant=f"t{self._names % TENANTS}",
            namespace=f"t{self._names % TENANTS}",
            prompt_token_ids=rng.choices(range(_VOCABULARY), k=rng.randint(*PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=output, temperature=0.8, top_p=0.95, stop_token_ids=(0, 2)),
            predicted_output_tokens=sum(OUTPUT_TOKENS) // 2,
        )
        begin = time.thread_time()
        self._scheduler.submit(request, 0.0)
        self.seconds += time.thread_time() - begin

    def time_cache(self) -> None:
        """From now on `cache_seconds` grows by the time inside the operations that work in the tree."""
        cache = self._scheduler.cache
        begin = time.thread_time()
        for _ in range(1000):
            time.thread_time()
        clock = (time.thread_time() - begin) / 1000
        for name in ("open", "extend", "reserve", "share", "close"):
            setattr(cache, name, self._timed(getattr(cache, name), clock))

    def _timed(self, function: Callable[..., Any], clock: float) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            answer = function(*args, **options)
            self.cache_seconds += time.thread_time() - begin - clock
            return answer

        return timed


def _null_result(record: StepRecord) -> StepResult:
    sampled = int(record.is_last_chunk.sum())
    tokens = (np.arange(sampled, dtype=np.int32) + record.step) % _VOCABULARY + 3
    return StepResult(record.step, tokens.astype(np.int32), np.ones(sampled, np.bool_), 0.0)
