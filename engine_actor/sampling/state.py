"""What requests with unusual wishes carry from step to step, and the columns made of it. Plain requests have none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine_actor.request import EngineRequest, SamplingParams, StreamRow, TokenLogprob
from engine_actor.step import (
    BiasColumns,
    LogprobColumns,
    Logprobs,
    PenaltyColumns,
    PromptLogprobColumns,
    SamplingColumns,
    StepRecord,
    StepResult,
)

MAX_PROMPT_LOGITS = 256
"""Prompt tokens of one step whose logits are kept for their log probabilities: bounds the memory of a step."""


class SamplingState:
    """One request that asks for min_p, biases, penalties, min_tokens or log probabilities.

    `counts` has the distinct tokens of prompt and output, with their number in the output; None without penalties.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.params = params = request.sampling
        self.output_tokens = 0
        self.prompt_tokens = len(request.prompt_token_ids)
        self.prompt_logprobs_left = 0 if params.prompt_logprobs is None else self.prompt_tokens - 1
        self.counts: dict[int, int] | None = None
        if has_penalties(params):
            self.counts = dict.fromkeys(request.prompt_token_ids, 0)
        self.bias_tokens = [token for token, _ in params.logit_bias]
        self.bias_values = [value for _, value in params.logit_bias]

    @classmethod
    def of(cls, request: EngineRequest) -> SamplingState | None:
        """The state of a request, None for one that is plain."""
        params = request.sampling
        plain = SamplingParams(
            params.max_tokens,
            params.temperature,
            params.top_k,
            params.top_p,
            params.seed,
            params.stop_token_ids,
        )
        return None if params == plain else cls(request)

    @property
    def needs_result(self) -> bool:
        """Whether the next token has to wait until the one before is known.

        The output so far decides what is done to its logits, or log probabilities are wanted, for which a runner waits.
        """
        params = self.params
        return (
            self.counts is not None or self.output_tokens < params.min_tokens or params.logprobs is not None
        )

    def append(self, token: int) -> None:
        """A token has been sampled."""
        self.output_tokens += 1
        if self.counts is not None:
            self.counts[token] = self.counts.get(token, 0) + 1

    def take_prompt(self, logprobs: RowLogprobs, start: int) -> RowLogprobs:
        """The row's log probabilities without those of prompt tokens that were taken before.

        `start` is the first position of the row. A preempted request computes tokens again: their entries come again.
        """
        next_position = self.prompt_tokens - self.prompt_logprobs_left
        fresh = logprobs.prompt[max(0, next_position - start - 1) :]
        self.prompt_logprobs_left -= len(fresh)
        return replace(logprobs, prompt=fresh)


def has_penalties(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


def with_wishes(columns: SamplingColumns, rows: Sequence[tuple[int, SamplingState]]) -> SamplingColumns:
    """The columns with what `rows`, pairs of (row of the S rows, its state), ask for. Only they cost anything."""
    if not rows:
        return columns
    min_p = None
    if any(state.params.min_p > 0 for _, state in rows):
        min_p = np.zeros(len(columns.temperature), np.float32)
        for row, state in rows:
            min_p[row] = state.params.min_p
    logprobs = [(row, state.params.logprobs) for row, state in rows if state.params.logprobs is not None]
    return replace(
        columns,
        min_p=min_p,
        bias=_bias(rows),
        penalties=_penalties([(row, state, state.counts) for row, state in rows if state.counts is not None]),
        logprobs=LogprobColumns(*np.array(logprobs, np.int32).T) if logprobs else None,
    )


def _bias(rows: Sequence[tuple[int, SamplingState]]) -> BiasColumns | None:
    counts: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for _, state in rows:
        before = len(tokens)
        tokens += state.bias_tokens
        values += state.bias_values
        if state.output_tokens < state.params.min_tokens:
            tokens += state.params.stop_token_ids
            values += [-np.inf] * len(state.params.stop_token_ids)
        counts.append(len(tokens) - before)
    if not tokens:
        return None
    row = np.repeat(np.array([row for row, _ in rows], np.int32), counts)
    return BiasColumns(row, np.array(tokens, np.int32), np.array(values, np.float32))


def _penalties(rows: Sequence[tuple[int, SamplingState, dict[int, int]]]) -> PenaltyColumns | None:
    if not rows:
        return None
    params = [state.params for _, state, _ in rows]
    lengths = [len(counts) for *_, counts in rows]
    return PenaltyColumns(
        row=np.array([row for row, *_ in rows], np.int32),
        presence=np.array([p.presence_penalty for p in params], np.float32),
        frequency=np.array([p.frequency_penalty for p in params], np.float32),
        repetition=np.array([p.repetition_penalty for p in params], np.float32),
        token_indptr=np.cumsum([0, *lengths]).astype(np.int32),
        token=np.concatenate([np.fromiter(counts, np.int32, len(counts)) for *_, counts in rows]),
        count=np.concatenate([np.fromiter(counts.values(), np.int32, len(counts)) for *_, counts in rows]),
    )


def following(prompt: list[int], start: int, end: int) -> list[int]:
    """The prompt's tokens behind each of the positions start .. end - 1, -1 behind its last."""
    tokens = prompt[start + 1 : end + 1]
    return tokens + [-1] * (end - start - len(tokens))


def prompt_columns(rows: Sequence[tuple[int, SamplingState, list[int]]]) -> PromptLogprobColumns | None:
    """Columns of (row of the R rows, its state, what `following` gives for its positions)."""
    if not rows:
        return None
    return PromptLogprobColumns(
        row=np.array([row for row, *_ in rows], np.int32),
        top=np.array([state.params.prompt_logprobs for _, state, _ in rows], np.int32),
        target=np.array([token for *_, targets in rows for token in targets], np.int32),
    )


@dataclass(frozen=True)
class RowLogprobs:
    """Log probabilities that one row of a step got: of its new token, and of the prompt's tokens."""

    output: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob, ...] = ()

    @property
    def finite(self) -> bool:
        return all(math.isfinite(entry.logprob) for entry in self.output + self.prompt)

    def add_to(self, row: StreamRow) -> StreamRow:
        """The row with these log probabilities, those of the output only beside a token."""
        return row._replace(logprobs=self.output if row.token_ids else (), prompt_logprobs=self.prompt)


NO_LOGPROBS = RowLogprobs()


def step_logprobs(record: StepRecord, result: StepResult) -> dict[int, RowLogprobs]:
    """What a result brings for each of the R rows that wanted log probabilities."""
    rows: dict[int, RowLogprobs] = {}
    output, prompt = record.sampling.logprobs, record.prompt_logprobs
    if output is not None and result.logprobs is not None:
        sampled = np.flatnonzero(record.is_last_chunk)
        for i, (row, top) in enumerate(zip(sampled[output.row].tolist(), output.top.tolist(), strict=True)):
            rows[row] = RowLogprobs(output=_entries(result.logprobs, i, i + 1, top))
    if prompt is not None and result.prompt_logprobs is not None:
        begin = 0
        for row, top in zip(prompt.row.tolist(), prompt.top.tolist(), strict=True):
            end = begin + int(record.length[row])
            known = begin + int(np.count_nonzero(prompt.target[begin:end] >= 0))
            own = rows.get(row, NO_LOGPROBS)
            rows[row] = replace(own, prompt=_entries(result.prompt_logprobs, begin, known, top))
            begin = end
    return rows


def _entries(logprobs: Logprobs, begin: int, end: int, top: int) -> tuple[TokenLogprob, ...]:
    """Entries begin .. end - 1 as records, with the `top` likeliest tokens each."""
    tokens = logprobs.token[begin:end].tolist()
    values = logprobs.logprob[begin:end].tolist()
    top_tokens = logprobs.top_token[begin:end, :top].tolist()
    top_values = logprobs.top_logprob[begin:end, :top].tolist()
    return tuple(
        TokenLogprob(token, value, tuple(zip(ids, their_values, strict=True)))
        for token, value, ids, their_values in zip(tokens, values, top_tokens, top_values, strict=True)
    )
