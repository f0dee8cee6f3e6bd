"""A first idea of an engine's speed: a few made-up steps on the real executor, before any request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from engine_actor.executor import PAGE_SIZE, Runner
from engine_actor.scheduler import SchedulerConfig
from engine_actor.step import SamplingColumns, StepRecord
from engine_actor.step_control import step_features
from policies.latency_model import StepTimeModel

CALIBRATION_SECONDS = 1.0


def calibrate(
    runner: Runner,
    config: SchedulerConfig,
    *,
    seconds: float = CALIBRATION_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> StepTimeModel:
    """Time prompt chunks and decode batches of several sizes, for about `seconds`, but at least one of each.

    Call it before the first request: it writes to KV pages that nobody holds yet.
    """
    model = StepTimeModel()
    shapes = list(_shapes(config, runner.num_pages))
    for lengths, start in shapes[:2]:  # warms up whatever was never touched
        runner.run(_record(lengths, start, runner.num_pages))
    begin = clock()
    for lengths, start in shapes:
        before = clock()
        if model.observations >= 2 and before - begin > seconds:
            break
        record = _record(lengths, start, runner.num_pages)
        before = clock()
        runner.run(record)
        model.observe(step_features(record), clock() - before)
    return model


def _shapes(config: SchedulerConfig, num_pages: int) -> Iterator[tuple[list[int], int]]:
    """Row lengths and the position all rows start at: first a prompt chunk and a decode batch, then others."""
    room = min(config.max_model_len, (num_pages - 1) * PAGE_SIZE) - 1
    chunk = max(2, min(config.prefill_chunk_size, config.max_num_batched_tokens, room))
    rows = max(1, min(config.max_num_seqs, config.max_num_batched_tokens))
    far = max(0, min(512, room - chunk))
    for _ in range(3):
        for size, batch in ((max(2, chunk // 4), rows), (chunk, 1), (max(2, chunk // 2), max(1, rows // 4))):
            for start in (far, 0):
                yield [size], start
                yield [1] * batch, start


def _record(lengths: list[int], start: int, num_pages: int) -> StepRecord:
    """A step over pages 1, 2, ...: rows share all but the page that a decode row writes to."""
    count = len(lengths)
    pages = []
    for row, length in enumerate(lengths):
        table = np.arange(1, -(-(start + length) // PAGE_SIZE) + 1, dtype=np.int32)
        table[-1] = 1 + (table[-1] - 1 + row) % (num_pages - 1)
        pages.append(table)
    return StepRecord(
        epoch=0,
        step=0,
        request=np.arange(count, dtype=np.int32),
        request_epoch=np.zeros(count, np.int32),
        start=np.full(count, start, np.int32),
        length=np.array(lengths, np.int32),
        is_last_chunk=np.ones(count, np.bool_),
        token_ids=np.ones(sum(lengths), np.int32),
        token_indptr=np.cumsum([0, *lengths]).astype(np.int32),
        page_indices=np.concatenate(pages),
        page_indptr=np.cumsum([0, *map(len, pages)]).astype(np.int32),
        sampling=SamplingColumns(
            temperature=np.zeros(count, np.float32),
            top_k=np.zeros(count, np.int32),
            top_p=np.ones(count, np.float32),
            seed=np.zeros(count, np.uint64),
            position=np.array([start + length for length in lengths], np.int32),
        ),
    )
