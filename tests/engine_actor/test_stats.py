from __future__ import annotations

import pickle
import threading
import time

import pytest

from engine_actor.stats import BATCH_BOUNDS_REQUESTS, EngineStats, Histogram


def step(stats: EngineStats, now: float = 1.0, chunks: tuple[int, ...] = (), decode: int = 0) -> None:
    stats.observe_step(
        now=now,
        iteration_seconds=0.02,
        scheduler_seconds=0.001,
        model_seconds=0.018,
        prefill_chunks=chunks,
        decode_requests=decode,
    )


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.snapshot().counts == (2, 2, 1)
    assert histogram.sum == 14.0
    assert histogram.count == 5


def test_merge_adds_and_refuses_other_bounds() -> None:
    first, second = Histogram((1.0,)), Histogram((1.0,))
    first.observe(0.5)
    second.observe(2.0)
    first.merge(second)
    assert (first.counts, first.sum) == ([1, 1], 2.5)
    with pytest.raises(ValueError, match="bounds"):
        first.merge(Histogram((3.0,)))


def test_steps_add_up() -> None:
    stats = EngineStats("engine-0", 3, "tiny")
    step(stats, chunks=(64, 10), decode=4)
    step(stats, now=2.0, decode=17)
    step(stats, now=2.5)
    stats.observe_input(cached_tokens=30, computed_tokens=70)
    stats.observe_step(
        now=3.0,
        iteration_seconds=0.6,
        scheduler_seconds=0.0,
        model_seconds=0.5,
        prefill_chunks=[16],
        decode_requests=0,
        recomputed_chunks=1,
        preemptions=2,
    )
    snapshot = stats.snapshot(now=4.5)
    assert (snapshot.engine, snapshot.engine_epoch, snapshot.model) == ("engine-0", 3, "tiny")
    assert snapshot.steps == snapshot.iteration_seconds.count == 4
    assert snapshot.prefill_chunk_tokens.count == 3 and snapshot.prefill_chunk_tokens.sum == 90
    assert snapshot.decode_batch_requests.count == 2 and snapshot.decode_batch_requests.sum == 21
    above_16 = BATCH_BOUNDS_REQUESTS.index(16) + 1
    assert sum(snapshot.decode_batch_requests.counts[above_16:]) == 1
    assert (snapshot.recomputed_chunks, snapshot.preemptions) == (1, 2)
    assert snapshot.prefix_cache_hit_rate == pytest.approx(0.3)
    assert snapshot.last_step_age_s == pytest.approx(1.5)


def test_state_before_the_first_step() -> None:
    snapshot = EngineStats("engine-0", 1, "tiny").snapshot(now=0.0)
    assert snapshot.last_step_age_s is None
    assert snapshot.prefix_cache_hit_rate == 0.0


def test_gauges_follow_without_steps() -> None:
    stats = EngineStats("engine-0", 1, "tiny")
    state = {"free_pages": 1, "evictable_pages": 2, "total_pages": 10, "reclaimed_pages": 5}
    stats.set_state(running=100, waiting=6, **state)
    stats.set_state(running=0, waiting=0, **(state | {"free_pages": 8}))
    snapshot = stats.snapshot(now=0.0)
    assert (snapshot.running, snapshot.waiting) == (0, 0)
    assert snapshot.free_pages + snapshot.evictable_pages == snapshot.total_pages == 10
    assert snapshot.reclaimed_pages == 5


def test_snapshot_is_a_picklable_copy() -> None:
    stats = EngineStats("engine-0", 1, "tiny")
    step(stats, decode=2)
    before = stats.snapshot(now=1.0)
    step(stats, decode=2)
    assert before.steps == 1 and before.decode_batch_requests.count == 1
    assert pickle.loads(pickle.dumps(before)) == before


def test_snapshots_from_another_thread_are_consistent() -> None:
    stats = EngineStats("engine-0", 1, "tiny")
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            step(stats, chunks=(64,), decode=3)

    worker = threading.Thread(target=loop)
    worker.start()
    try:
        for _ in range(300):
            snapshot = stats.snapshot(now=1.0)
            assert snapshot.steps == snapshot.iteration_seconds.count
            assert (
                snapshot.steps == snapshot.prefill_chunk_tokens.count == snapshot.decode_batch_requests.count
            )
    finally:
        stop.set()
        worker.join()


def test_observing_a_step_is_cheap() -> None:
    """Least of several runs, so that a busy machine does not matter; the budget of the step loop is 20 us."""
    stats = EngineStats("engine-0", 1, "tiny")
    chunks = (64, 64, 64, 64)
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        for _ in range(500):
            step(stats, chunks=chunks, decode=32)
        best = min(best, (time.thread_time() - start) / 500)
    assert best < 20e-6
