"""Writing the record of a step from the columns of the running requests."""

from __future__ import annotations

import numpy as np

from engine_actor.running import RunningSet
from engine_actor.sampling.state import SamplingState, following, prompt_columns, with_wishes
from engine_actor.sequence import SequenceState
from engine_actor.step import Int32, SamplingColumns, StepRecord


def write_record(
    epoch: int, step: int, running: RunningSet, decodes: np.ndarray, prefills: list[tuple[SequenceState, int]]
) -> StepRecord:
    """The record of a step: one token for each slot in `decodes`, then the next tokens of each of `prefills`.

    Moves `computed` of all of them. A newest token that is computed already is one that nobody knows yet: the step in
    flight samples the next.
    """
    token_ids: list[int] = []
    prompts: list[tuple[int, SamplingState, list[int]]] = []
    for slot, sampled_row in zip(decodes.tolist(), running.sampled_row[decodes].tolist(), strict=True):
        sequence = running.sequences[slot]
        assert sequence is not None
        known = sequence.computed < len(sequence.token_ids)
        token_ids.append(sequence.token_ids[-1] if known else -1 - sampled_row)
        sequence.computed += 1
    for row, (sequence, length) in enumerate(prefills, len(decodes)):
        start, end = sequence.computed, sequence.computed + length
        token_ids += sequence.token_ids[start:end]
        if sequence.wishes is not None and sequence.wants_prompt_logits:
            targets = following(sequence.request.prompt_token_ids, start, end)
            prompts.append((row, sequence.wishes, targets))
        sequence.computed = end
    slots = np.concatenate((decodes, np.array([sequence.slot for sequence, _ in prefills], np.int64)))
    lengths = np.ones(len(slots), np.int32)
    lengths[len(decodes) :] = [length for _, length in prefills]
    starts = running.computed[slots]
    ends = starts + lengths
    running.computed[slots] = ends
    last = ends == running.known[slots]
    last[: len(decodes)] = True
    sampled = slots[last]
    running.sampled_row[sampled] = np.arange(len(sampled))
    running.last_turn[decodes] = step * len(running.last_turn) + np.arange(len(decodes))
    page_indices, page_indptr = running.table_columns(slots, ends)
    token_indptr = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(lengths, out=token_indptr[1:])
    return StepRecord(
        epoch=epoch,
        step=step,
        request=running.id[slots],
        request_epoch=running.epoch[slots],
        start=starts,
        length=lengths,
        is_last_chunk=last,
        token_ids=np.array(token_ids, np.int32),
        token_indptr=token_indptr,
        page_indices=page_indices,
        page_indptr=page_indptr,
        sampling=_sampling_columns(running, sampled, ends[last]),
        prompt_logprobs=prompt_columns(prompts),
        num_decodes=len(decodes),
    )


def _sampling_columns(running: RunningSet, slots: np.ndarray, positions: Int32) -> SamplingColumns:
    columns = SamplingColumns(
        temperature=running.temperature[slots],
        top_k=running.top_k[slots],
        top_p=running.top_p[slots],
        seed=running.seed[slots],
        position=positions,
    )
    wishes: list[tuple[int, SamplingState]] = []
    for row in np.flatnonzero(running.has_wishes[slots]).tolist():
        sequence = running.sequences[slots[row]]
        assert sequence is not None and sequence.wishes is not None
        wishes.append((row, sequence.wishes))
    return with_wishes(columns, wishes)
