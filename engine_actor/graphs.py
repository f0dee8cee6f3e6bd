"""CUDA graphs of pure decode steps: the launches of a whole step recorded once per padded size and replayed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_actor.attention.base import token_slots
from engine_actor.attention.flashinfer import (
    FlashInferBackend,
    FlashInferMetadata,
    PageTable,
    PlannedWrappers,
)
from engine_actor.executor import DUMMY_PAGE, PAGE_SIZE, GraphCounters
from engine_actor.step import StepRecord
from engine_actor.transfer import fill_in, staged

MAX_GRAPH_ROWS = 256

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs the work until its kernels are warm, records it once, and returns what replays it."""

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""(token ids [T], positions [T], indexes of the tokens that need logits [S], attention metadata) to [S, vocab]."""


@dataclass(frozen=True)
class _Graph:
    rows: int
    wrappers: PlannedWrappers
    replay: Callable[[], None]


def graph_sizes(max_rows: int) -> list[int]:
    """Padded sizes up to the first that holds `max_rows`: 1, 2, 4, then multiples of 8 to 256."""
    sizes = [1, 2, 4, *range(8, MAX_GRAPH_ROWS + 1, 8)]
    return sizes[: bisect_left(sizes, min(max_rows, MAX_GRAPH_ROWS)) + 1]


def cuda_graph_capture() -> Capture:
    """Capture into CUDA graphs that share one memory pool. Only one of them may run at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay

    return capture


class DecodeGraphs:
    """Graphs for decode steps of 1 .. max_rows rows, all captured when it is made, the largest first: the memory that
    it needs then serves the smaller ones.

    The graphs read fixed input buffers and write one output buffer. A step is padded to the next size with rows that
    hold one token of the dummy page.
    """

    def __init__(
        self,
        forward: Forward,
        backend: FlashInferBackend,
        *,
        max_rows: int,
        max_model_len: int,
        vocab_size: int,
        capture: Capture | None = None,
    ) -> None:
        """`max_model_len` bounds the page table of a row. `capture` None means CUDA graphs."""
        self.counters = GraphCounters()
        self._forward = forward
        self._backend = backend
        sizes = graph_sizes(max_rows)
        largest, device = sizes[-1], backend.device
        pages = largest * -(-max_model_len // PAGE_SIZE)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = torch.full((largest,), DUMMY_PAGE * PAGE_SIZE, dtype=torch.int64, device=device)
        self._rows = torch.arange(largest, dtype=torch.int64, device=device)
        self._indptr = torch.zeros(largest + 1, dtype=torch.int32, device=device)
        self._indices = torch.full((pages,), DUMMY_PAGE, dtype=torch.int32, device=device)
        self._last_page_len = torch.ones(largest, dtype=torch.int32, device=device)
        self._logits = torch.empty((largest, vocab_size), dtype=torch.float32, device=device)
        self._sizes = sizes
        capture = capture or cuda_graph_capture()
        started = time.perf_counter()
        self._graphs = {rows: self._capture(rows, capture) for rows in reversed(sizes)}
        self.counters.captured = len(sizes)
        self.counters.capture_seconds = time.perf_counter() - started

    def execute(self, record: StepRecord, sampled: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits float32 [R, vocab] of a pure decode step, valid until the next call; None if no graph serves it.

        `sampled` as in the executor.
        """
        rows = record.num_rows
        if rows > self._sizes[-1] or record.num_tokens != rows or not record.is_last_chunk.all():
            self.counters.eager_steps += 1
            return None
        graph = self._graphs[self._sizes[bisect_left(self._sizes, rows)]]
        self._backend.plan_decode(graph.wrappers, PageTable.of(record).padded(graph.rows))
        dummy = np.zeros(graph.rows - rows, np.int64)
        for buffer, values in (
            (self._token_ids, record.token_ids),
            (self._positions, record.start),
            (self._slots, token_slots(record)),
        ):
            padded = np.concatenate((values, dummy))
            buffer[: graph.rows].copy_(staged(padded, buffer.device), non_blocking=True)
        fill_in(self._token_ids[:rows], record, sampled)
        graph.replay()
        self.counters.replays += 1
        return self._logits[:rows]

    def _capture(self, rows: int, capture: Capture) -> _Graph:
        wrappers = self._backend.graph_wrappers(
            self._indptr[: rows + 1], self._indices, self._last_page_len[:rows]
        )
        empty = np.zeros(0, np.int32)
        self._backend.plan_decode(wrappers, PageTable(np.zeros(1, np.int32), empty, empty).padded(rows))
        metadata = FlashInferMetadata(wrappers.wrappers, self._slots[:rows])

        def work() -> None:
            self._logits[:rows].copy_(
                self._forward(self._token_ids[:rows], self._positions[:rows], self._rows[:rows], metadata)
            )

        return _Graph(rows, wrappers, capture(work))
