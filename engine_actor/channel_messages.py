"""What gateways and engines say to each other, in MessagePack: requests one way, rows of steps the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine_actor.message_socket import pack, unpack
from engine_actor.request import (
    EngineRequest,
    FinishReason,
    RequestTimings,
    RequestUsage,
    SamplingParams,
    StreamRow,
    TokenLogprob,
)

Key = tuple[str, int]
"""(request, attempt)"""

MAX_SUBMIT_TOKENS = 10_000_000
"""Prompt tokens of one `Submit`, repeated prompts counted each time: at five bytes each the message stays below
MAX_BYTES, with room for the sampling parameters of some hundreds of requests."""


class Submit(NamedTuple):
    """Requests to take, all or none, idempotent by key. The answer carries the same number."""

    number: int
    requests: list[EngineRequest]


class Abort(NamedTuple):
    """Requests to end early; each gets a last row with reason "abort"."""

    keys: list[Key]


class Renew(NamedTuple):
    """The lease of the gateway and of these requests, which are all that it still wants."""

    keys: list[Key]


class SubmitAnswer(NamedTuple):
    """`refusal` says why the requests were not taken, None when they were."""

    number: int
    refusal: str | None


@dataclass(frozen=True)
class StepMessage:
    """One message per engine step and gateway (engine -> gateway): every stream of that gateway in it.

    `wall_time_ns` is the engine's wall clock when the step ended: the anchor for spans, never for decisions.
    """

    engine: str
    engine_epoch: int
    step: int
    wall_time_ns: int
    rows: tuple[StreamRow, ...] = field(default=())


_KINDS = {Submit: "submit", Abort: "abort", Renew: "renew"}


def pack_request(message: Submit | Abort | Renew) -> bytes:
    """A message of a gateway."""
    return pack((_KINDS[type(message)], *message))


def unpack_request(data: bytes) -> Submit | Abort | Renew:
    """The message of `pack_request`. Raises ValueError or TypeError."""
    kind, *values = unpack(data)
    if kind == "submit":
        number, requests = values
        return Submit(number, [_request(*one) for one in requests])
    (keys,) = values
    if kind == "abort":
        return Abort(list(keys))
    if kind == "renew":
        return Renew(list(keys))
    raise ValueError(f"no such message: {kind}")


def pack_answer(message: StepMessage | SubmitAnswer) -> bytes:
    """A message of an engine; rows without the fields that are mostly empty."""
    if isinstance(message, SubmitAnswer):
        return pack(message)
    rows = [row[:3] if row[3:] == _MOSTLY_EMPTY else tuple(row) for row in message.rows]
    return pack((message.engine, message.engine_epoch, message.step, message.wall_time_ns, rows))


def unpack_answer(data: bytes) -> StepMessage | SubmitAnswer:
    """The message of `pack_answer`. Raises ValueError or TypeError."""
    values = unpack(data)
    if len(values) == 2:
        return SubmitAnswer(*values)
    engine, engine_epoch, step, wall_time_ns, rows = values
    return StepMessage(
        engine,
        engine_epoch,
        step,
        wall_time_ns,
        tuple([StreamRow(*row) if len(row) == 3 else _row(*row) for row in rows]),
    )


_MOSTLY_EMPTY = StreamRow("", 0, ())[3:]


def _request(
    request: str,
    attempt: int,
    ticket: str,
    tenant: str,
    prompt_token_ids: tuple[int, ...],
    sampling: tuple[Any, ...],
    *rest: Any,
) -> EngineRequest:
    return EngineRequest(
        request, attempt, ticket, tenant, list(prompt_token_ids), SamplingParams(*sampling), *rest
    )


def _row(
    request: str,
    attempt: int,
    token_ids: tuple[int, ...],
    finish_reason: FinishReason | None,
    error: str | None,
    usage: tuple[int, ...] | None,
    timings: tuple[Any, ...] | None,
    *logprobs: tuple[tuple[Any, ...], ...],
) -> StreamRow:
    return StreamRow(
        request,
        attempt,
        token_ids,
        finish_reason,
        error,
        RequestUsage(*usage) if usage else None,
        RequestTimings(*timings) if timings else None,
        *(tuple([TokenLogprob(*one) for one in each]) for each in logprobs),
    )
