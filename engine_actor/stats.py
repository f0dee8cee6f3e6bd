"""Engine statistics in plain Python: what one engine counts, and a frozen copy of it to send out.

The step loop writes once per iteration, the actor's event loop takes snapshots from another thread. Every
counter is cumulative since the engine started, so a lost snapshot does no harm. Nothing here knows how
metrics are exposed.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from engine_actor.executor import ExecutorInfo, GraphCounters

ITERATION_BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
"""0.2 and 0.5 s are the alert lines of an iteration."""

CHUNK_BOUNDS_TOKENS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)

BATCH_BOUNDS_REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


@dataclass(frozen=True)
class HistogramSnapshot:
    """`counts[i]` values were in (bounds[i - 1], bounds[i]]; one more count is above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts of values between fixed ascending upper bounds, each bound inclusive. Not thread-safe."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: Histogram) -> None:
        """Add the counts of `other`. Raises ValueError if its bounds differ."""
        if other.bounds != self.bounds:
            raise ValueError("histograms with different bounds cannot be merged")
        for index, count in enumerate(other.counts):
            self.counts[index] += count
        self.sum += other.sum

    @property
    def count(self) -> int:
        return sum(self.counts)

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self.counts), self.sum)


@dataclass
class PrefixCounters:
    """Prompt tokens of one tenant that the prefix cache held and did not hold, and pages it gave up. Cumulative."""

    hit_tokens: int = 0
    miss_tokens: int = 0
    evicted_pages: int = 0


@dataclass(frozen=True)
class EngineStatsSnapshot:
    """State of one engine at one moment. Counters are cumulative since `engine_epoch` began; times in s.

    `last_step_age_s` is the time since the last step ended, None before the first one. It grows while idle.
    `free_pages` hold nothing, `evictable_pages` hold cached prefixes nobody uses now, `reclaimed_pages`
    counts the evictions so far. `graphs` is None where no graphs are captured.
    """

    engine: str
    engine_epoch: int
    model: str
    iteration_seconds: HistogramSnapshot
    prefill_chunk_tokens: HistogramSnapshot
    decode_batch_requests: HistogramSnapshot
    steps: int
    scheduler_seconds: float
    model_seconds: float
    recomputed_chunks: int
    preemptions: int
    cached_input_tokens: int
    computed_input_tokens: int
    running: int
    waiting: int
    free_pages: int
    evictable_pages: int
    total_pages: int
    reclaimed_pages: int
    last_step_age_s: float | None
    graphs: GraphCounters | None = None
    info: ExecutorInfo | None = None
    nonfinite_requests: int = 0
    """Requests ended because the model returned logits that are not finite."""
    prefix: dict[str, PrefixCounters] = field(default_factory=dict)
    """By tenant. Pages of a namespace that several tenants share are counted for the tenant ""."""
    live_requests: int = 0
    """Those that the actor answers for: a gateway has not had their last row."""
    tasks: int = 0
    """Of the actor's event loop."""

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the input tokens found in the prefix cache, 0 before the first request."""
        total = self.cached_input_tokens + self.computed_input_tokens
        return self.cached_input_tokens / total if total else 0.0


class EngineStats:
    """Accumulates what an engine does. Thread-safe; an `observe_step` call costs a few microseconds."""

    def __init__(self, engine: str, engine_epoch: int, model: str) -> None:
        self._engine = engine
        self._engine_epoch = engine_epoch
        self._model = model
        self._lock = threading.Lock()
        self._iteration = Histogram(ITERATION_BOUNDS_S)
        self._chunks = Histogram(CHUNK_BOUNDS_TOKENS)
        self._decode = Histogram(BATCH_BOUNDS_REQUESTS)
        self._steps = 0
        self._scheduler_seconds = 0.0
        self._model_seconds = 0.0
        self._recomputed_chunks = 0
        self._preemptions = 0
        self._cached_input = 0
        self._computed_input = 0
        self._running = 0
        self._waiting = 0
        self._free_pages = 0
        self._evictable_pages = 0
        self._total_pages = 0
        self._reclaimed_pages = 0
        self._last_step: float | None = None
        self._graphs: GraphCounters | None = None
        self._nonfinite_requests = 0
        self.info: ExecutorInfo | None = None
        """Set once the model is loaded."""

    def observe_step(
        self,
        *,
        now: float,
        iteration_seconds: float,
        scheduler_seconds: float,
        model_seconds: float,
        prefill_chunks: Iterable[int],
        decode_requests: int,
        recomputed_chunks: int = 0,
        preemptions: int = 0,
    ) -> None:
        """Count one finished iteration.

        `now` is the engine's monotonic clock in seconds. `prefill_chunks` holds the size in tokens of each
        prompt chunk of the step, recomputed ones included; `recomputed_chunks` says how many of them had been
        computed before. A step without decode rows gives no sample of the decode batch.
        """
        with self._lock:
            self._steps += 1
            self._last_step = now
            self._iteration.observe(iteration_seconds)
            self._scheduler_seconds += scheduler_seconds
            self._model_seconds += model_seconds
            for tokens in prefill_chunks:
                self._chunks.observe(tokens)
            if decode_requests:
                self._decode.observe(decode_requests)
            self._recomputed_chunks += recomputed_chunks
            self._preemptions += preemptions

    def observe_input(self, *, cached_tokens: int, computed_tokens: int) -> None:
        """Count the input of one request, once, when its prefix was looked up; never its recomputation."""
        with self._lock:
            self._cached_input += cached_tokens
            self._computed_input += computed_tokens

    def set_state(
        self,
        *,
        running: int,
        waiting: int,
        free_pages: int,
        evictable_pages: int,
        total_pages: int,
        reclaimed_pages: int,
        graphs: GraphCounters | None = None,
        nonfinite_requests: int = 0,
    ) -> None:
        """Current state. Call after every step and before every snapshot: no gauge freezes when idle.

        `reclaimed_pages` is the cache's own count of evicted pages so far, `nonfinite_requests` the scheduler's of
        requests whose logits were not finite; the dummy page counts in no number of pages.
        """
        with self._lock:
            self._running = running
            self._waiting = waiting
            self._free_pages = free_pages
            self._evictable_pages = evictable_pages
            self._total_pages = total_pages
            self._reclaimed_pages = reclaimed_pages
            self._graphs = None if graphs is None else replace(graphs)
            self._nonfinite_requests = nonfinite_requests

    def snapshot(self, now: float) -> EngineStatsSnapshot:
        """A consistent, picklable copy. `now` is the clock of `observe_step`."""
        with self._lock:
            return EngineStatsSnapshot(
                engine=self._engine,
                engine_epoch=self._engine_epoch,
                model=self._model,
                iteration_seconds=self._iteration.snapshot(),
                prefill_chunk_tokens=self._chunks.snapshot(),
                decode_batch_requests=self._decode.snapshot(),
                steps=self._steps,
                scheduler_seconds=self._scheduler_seconds,
                model_seconds=self._model_seconds,
                recomputed_chunks=self._recomputed_chunks,
                preemptions=self._preemptions,
                cached_input_tokens=self._cached_input,
                computed_input_tokens=self._computed_input,
                running=self._running,
                waiting=self._waiting,
                free_pages=self._free_pages,
                evictable_pages=self._evictable_pages,
                total_pages=self._total_pages,
                reclaimed_pages=self._reclaimed_pages,
                last_step_age_s=None if self._last_step is None else max(0.0, now - self._last_step),
                graphs=self._graphs,
                info=self.info,
                nonfinite_requests=self._nonfinite_requests,
            )
