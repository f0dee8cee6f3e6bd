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

    Moves `computed` of all of them.
    """
    token_ids: list[int] = []
    prompts: list[tuple[int, SamplingState, list[int]]] = []
    for slot in decodes.tolist():
        sequence = running.sequences[slot]
        assert sequence is not None
        sequence.computed += 1
        token_ids.append(sequence.token_ids[-1])
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
        sampling=_sampling_columns(running, slots[last], ends[last]),
        prompt_logprobs=prompt_columns(prompts),
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
