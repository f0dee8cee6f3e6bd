"""Step records: the frozen contract between scheduler and runner, one per engine iteration.

Columnar arrays with integer request ids, so that a record can be sent to tensor-parallel ranks as it is. Results are
keyed by the record, never by the live state of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters of the rows that need a token, S rows in record order.

    `position` is the position the sampled token will take; randomness is a function of (seed, position).
    """

    temperature: Float32  # [S], 0 = greedy
    top_k: Int32  # [S], 0 = off
    top_p: Float32  # [S], 1 = off
    seed: UInt64  # [S]
    position: Int32  # [S]


@dataclass(frozen=True)
class StepRecord:
    """What one step computes, for R rows (one per scheduled request) and T tokens in all.

    Row i computes positions start[i] .. start[i] + length[i] - 1 of its request. Its tokens are
    token_ids[token_indptr[i]:token_indptr[i + 1]]; its pages, covering positions 0 .. start + length - 1, are
    page_indices[page_indptr[i]:page_indptr[i + 1]]. Rows with is_last_chunk end at the newest known token and need
    logits; the others do not. Decode rows are rows of length 1.
    """

    epoch: int
    step: int
    request: Int32  # [R] integer id of the request, unique within the engine epoch
    request_epoch: Int32  # [R] raised by each preemption; a result of an older epoch is ignored
    start: Int32  # [R]
    length: Int32  # [R]
    is_last_chunk: Bool  # [R]
    token_ids: Int32  # [T]
    token_indptr: Int32  # [R + 1]
    page_indices: Int32  # [P]
    page_indptr: Int32  # [R + 1]
    sampling: SamplingColumns

    @property
    def num_rows(self) -> int:
        return len(self.request)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StepResult:
    """Sampled tokens of one record: S entries, in the order of its rows with is_last_chunk.

    `finite` is False for a row whose logits were not all finite: its token is meaningless.
    `model_seconds` is the time spent in the executor and sampler.
    """

    step: int
    token_ids: Int32  # [S]
    finite: Bool  # [S]
    model_seconds: float
