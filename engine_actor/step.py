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
class BiasColumns:
    """B numbers to add to logits: to that of `token` in row `row` of the S rows. -inf forbids a token."""

    row: Int32  # [B]
    token: Int32  # [B]
    bias: Float32  # [B]


@dataclass(frozen=True)
class PenaltyColumns:
    """P rows with penalties, and each one's distinct tokens, H in all, with how often its output holds them.

    Row i of the P has the tokens token_indptr[i]:token_indptr[i + 1]; a count of 0 is a token of the prompt alone.
    """

    row: Int32  # [P], of the S rows
    presence: Float32  # [P], 0 = off
    frequency: Float32  # [P], 0 = off
    repetition: Float32  # [P], 1 = off
    token_indptr: Int32  # [P + 1]
    token: Int32  # [H]
    count: Int32  # [H]


@dataclass(frozen=True)
class LogprobColumns:
    """Q rows whose log probabilities are wanted, with `top` of the likeliest tokens each."""

    row: Int32  # [Q], of the S rows
    top: Int32  # [Q]


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters of the rows that need a token, S rows in record order.

    `position` is the position the sampled token will take; randomness is a function of (seed, position). What few
    rows ask for is None where no row does.
    """

    temperature: Float32  # [S], 0 = greedy
    top_k: Int32  # [S], 0 = off
    top_p: Float32  # [S], 1 = off
    seed: UInt64  # [S]
    position: Int32  # [S]
    min_p: Float32 | None = None  # [S], 0 = off
    bias: BiasColumns | None = None
    penalties: PenaltyColumns | None = None
    logprobs: LogprobColumns | None = None

    @property
    def plainly_greedy(self) -> bool:
        """Whether every row takes the likeliest token of its logits as they are, and nothing else is wanted."""
        nothing_more = self.bias is None and self.penalties is None and self.logprobs is None
        return nothing_more and not self.temperature.any()


@dataclass(frozen=True)
class PromptLogprobColumns:
    """Q rows whose every token needs logits, for the log probability of the prompt token that follows it.

    `target` holds the following tokens of all tokens of these rows, one row after another, -1 where none is known.
    """

    row: Int32  # [Q], of the R rows
    top: Int32  # [Q]
    target: Int32  # [N]


@dataclass(frozen=True)
class StepRecord:
    """What one step computes, for R rows (one per scheduled request) and T tokens in all.

    Row i computes positions start[i] .. start[i] + length[i] - 1 of its request. Its tokens are
    token_ids[token_indptr[i]:token_indptr[i + 1]]; its pages, covering positions 0 .. start + length - 1, are
    page_indices[page_indptr[i]:page_indptr[i + 1]]. Rows with is_last_chunk end at the newest known token: their last
    token needs logits. So do all tokens of the rows in `prompt_logprobs`. The first `num_decodes` rows compute one
    token each that was sampled, the others chunks of known tokens.

    A negative token id -1 - i is the token that the step before, still in flight, samples for its i-th row of S.
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
    prompt_logprobs: PromptLogprobColumns | None = None
    num_decodes: int = 0

    @property
    def chunk_lengths(self) -> list[int]:
        """Tokens of each chunk of a prompt, or of an answer that is computed again."""
        lengths: list[int] = self.length[self.num_decodes :].tolist()
        return lengths

    @property
    def num_rows(self) -> int:
        return len(self.request)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def sampled_tokens(self) -> Int32:
        """Indexes of the tokens whose logits the S sampled rows use."""
        return self.token_indptr[1:][self.is_last_chunk] - 1

    @property
    def logit_tokens(self) -> Int32:
        """Indexes of the tokens that need logits, ascending: L of them."""
        if self.prompt_logprobs is None:
            return self.sampled_tokens
        return np.union1d(self.sampled_tokens, self.prompt_tokens)

    @property
    def prompt_tokens(self) -> Int32:
        """Indexes of the tokens of the rows in `prompt_logprobs`, N of them."""
        assert self.prompt_logprobs is not None
        rows = self.prompt_logprobs.row
        ranges = [np.arange(self.token_indptr[row], self.token_indptr[row + 1]) for row in rows]
        tokens: Int32 = np.concatenate(ranges).astype(np.int32)
        return tokens


@dataclass(frozen=True)
class Logprobs:
    """Natural log probabilities of N tokens, each by the model's own logits, before anything of sampling.

    `top_token` holds the likeliest tokens in falling order, as many as the row that wanted most: K.
    """

    token: Int32  # [N]
    logprob: Float32  # [N]
    top_token: Int32  # [N, K]
    top_logprob: Float32  # [N, K]


@dataclass(frozen=True)
class StepResult:
    """Sampled tokens of one record: S entries, in the order of its rows with is_last_chunk.

    `finite` is False for a row whose logits were not all finite: its token is meaningless.
    `model_seconds` is the time spent in the executor and sampler. `logprobs` answers the record's
    sampling.logprobs in its order; `prompt_logprobs` its prompt_logprobs, one entry per target.
    """

    step: int
    token_ids: Int32  # [S]
    finite: Bool  # [S]
    model_seconds: float
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
