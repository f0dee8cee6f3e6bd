"""How fast the engines of a pool work off tickets, from their own estimates and the mix of requests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from policies.engine_load import PREFILL_BUFFER_STEPS, EngineLoad, prompt_pages
from policies.latency_model import StepEstimate, StepFeatures
from policies.service import ServicePrices
from policies.step_budget import PREFILL_FLOOR_TOKENS
from policies.tickets import Ticket
from policies.virtual_time import Fluid

_MIX_RATE = 1.0 / 64


class RequestMix:
    """Running means over the tickets that came: tokens in and expected out of one sequence."""

    def __init__(self) -> None:
        self.input_tokens = 0.0
        self.output_tokens = 0.0
        self._seen = 0

    def observe(self, ticket: Ticket) -> None:
        self._seen += 1
        rate = max(_MIX_RATE, 1.0 / self._seen)
        self.input_tokens += rate * (ticket.input_tokens / ticket.sequences - self.input_tokens)
        self.output_tokens += rate * (ticket.predicted_output_tokens / ticket.sequences - self.output_tokens)


@dataclass(frozen=True)
class EngineSpeed:
    """One engine with the pool's mix of requests. Prefill rates are prompt tokens per second: alone in the engine,
    beside what decodes just now, and under full load.

    Under full load: `service_per_second` in priced tokens, `step_seconds` per step with every slot decoding,
    `turnover_seconds` for which a request holds its slot.
    """

    load: EngineLoad
    mean_input_tokens: float
    service_per_second: float
    step_seconds: float
    turnover_seconds: float
    prefill_alone: float
    prefill_now: float
    prefill_loaded: float


@dataclass(frozen=True)
class EngineStart:
    """From a ticket's turn to its first token, in seconds: `gap` until a place is free, `prefill` after that, of which
    `least` is what the prompt takes alone."""

    gap: float
    prefill: float
    least: float


def pool_speed(loads: Iterable[EngineLoad], mix: RequestMix, prices: ServicePrices) -> list[EngineSpeed]:
    """The engines that take grants and tell how long their steps are."""
    speeds = (_engine_speed(load, mix, prices) for load in loads if not load.report.draining)
    return [speed for speed in speeds if speed is not None]


def first_token_seconds(ticket: Ticket, speeds: Iterable[EngineSpeed]) -> float:
    """Time from now until the first token must be out, so that both deadlines of the ticket can be met.

    The deadline of the last token leaves room for the output at the pace of a fully loaded engine.
    """
    due = math.inf if ticket.remaining_ttft_ms is None else ticket.remaining_ttft_ms / 1e3
    if ticket.remaining_deadline_ms is not None:
        expected = -(-ticket.predicted_output_tokens // ticket.sequences)
        output = max(ticket.output_tokens_bound, expected) - 1
        due = min(due, ticket.remaining_deadline_ms / 1e3 - output * min(s.step_seconds for s in speeds))
    return due


def engine_start(
    ticket: Ticket,
    speeds: Iterable[EngineSpeed],
    others: Fluid,
    *,
    share: float,
    ahead: float,
    reclaims: bool,
) -> EngineStart:
    """How soon the best engine could have the first token out, once it is the ticket's turn.

    `others` are the other tenants, `share` is the tenant's part of the pool beside them, `ahead` the priced work that
    goes first (with any, the engine is full by then). `reclaims`: a place may come from preempting somebody over their
    share.
    """
    starts = (_start(ticket, speed, others, share, ahead, reclaims) for speed in speeds)
    return min(starts, key=lambda start: start.gap + start.prefill)


def _engine_speed(load: EngineLoad, mix: RequestMix, prices: ServicePrices) -> EngineSpeed | None:
    report, estimate = load.report, load.report.step_estimate
    if estimate is None:
        return None
    budget = report.max_num_batched_tokens
    tokens_in, tokens_out = max(mix.input_tokens, 1.0), max(mix.output_tokens, 1.0)
    held = tokens_in + tokens_out
    fits = report.total_pages * report.page_size / held
    batch = max(1.0, min(float(report.max_num_seqs), fits, budget - min(PREFILL_FLOOR_TOKENS, budget / 2)))
    # One request takes tokens_out decode rows, `batch` of them a step, and all its tokens share the budget.
    steps = max(tokens_out / batch, held / budget)
    seconds = (
        steps * estimate.per_step
        + tokens_in * (estimate.per_prefill_token + estimate.per_prefill_context * tokens_in / 2)
        + tokens_out * (estimate.per_decode_row + estimate.per_decode_context * (tokens_in + tokens_out / 2))
    )
    seconds = max(seconds, 1e-9)
    service = prices.cost(computed_input=1) * tokens_in + prices.cost(output=1) * tokens_out
    step = seconds / steps * (1.0 + estimate.residual)
    return EngineSpeed(
        load=load,
        mean_input_tokens=tokens_in,
        service_per_second=service / seconds,
        step_seconds=step,
        turnover_seconds=tokens_out * step,
        prefill_alone=_prefill_rate(estimate, budget, 0, 0.0),
        prefill_now=_prefill_rate(estimate, budget, report.running, report.decode_context),
        prefill_loaded=_prefill_rate(estimate, budget, int(batch), batch * held / 2),
    )


def _prefill_rate(estimate: StepEstimate, budget: int, rows: int, context: float) -> float:
    rows = min(rows, budget - min(PREFILL_FLOOR_TOKENS, budget // 2))
    tokens = max(budget - rows, 1)
    seconds = estimate.seconds(StepFeatures(tokens, rows, int(context), tokens * tokens / 2))
    return tokens / max(seconds, 1e-9)


def _start(
    ticket: Ticket, speed: EngineSpeed, others: Fluid, share: float, ahead: float, reclaims: bool
) -> EngineStart:
    load = speed.load
    buffer = PREFILL_BUFFER_STEPS * load.report.max_num_batched_tokens
    tokens = max(1, ticket.input_tokens - load.cached_tokens(ticket))
    rate = speed.prefill_loaded if ahead > 0.0 else speed.prefill_now
    # A step is split by weight among the tenants in the engine: as many as the buffer lets in, with the work that they
    # have. What the tenant decodes in it is part of its share.
    rivals = min((1.0 - share) / share, buffer / speed.mean_input_tokens + 1.0)
    own_slots, _ = load.held_by(ticket.tenant)
    if own_slots:
        room = max(1, load.report.max_num_batched_tokens - load.sequences)
        own = share * load.report.max_num_batched_tokens - own_slots
        rivals = max(rivals, room / min(max(own, 1.0), room) - 1.0)
    waiting, per_second = others.demand
    beside = min(rivals * tokens, waiting + per_second * tokens / rate)
    prefill = (min(load.prefill_tokens + ahead, buffer) + tokens + beside) / rate
    return EngineStart(_gap(ticket, speed, share, reclaims), prefill, tokens / speed.prefill_alone)


def _gap(ticket: Ticket, speed: EngineSpeed, share: float, reclaims: bool) -> float:
    """Until the engine has slots and KV for the ticket, its peak with all that runs included."""
    load, report = speed.load, speed.load.report
    pool = report.total_pages * report.page_size
    peak = report.peak_kv_tokens + ticket.input_tokens + ticket.predicted_output_tokens
    missing_tokens = max(peak - pool, 0)
    missing_slots = load.sequences + ticket.sequences - report.max_num_seqs
    own_slots, own_pages = load.held_by(ticket.tenant)
    slots = own_slots + ticket.sequences
    pages = own_pages + prompt_pages(ticket, report.page_size)
    over_cap = pages - ticket.kv_share * report.total_pages if own_slots else 0.0
    if over_cap > 0.0:
        missing_tokens = max(missing_tokens, int(over_cap * report.page_size))
    elif load.sequences == 0 or (missing_tokens == 0 and missing_slots <= 0 and load.has_pages(ticket)):
        return 0.0
    page_share = min(share, ticket.kv_share)
    if reclaims and slots <= share * report.max_num_seqs and pages <= page_share * report.total_pages:
        return PREFILL_BUFFER_STEPS * speed.step_seconds  # by right: somebody over their share is preempted
    # Slots and pages come free evenly over a turnover; the tenant can count on its own ones alone.
    by_slots = max(missing_slots, 1) / max(own_slots, 1)
    by_tokens = missing_tokens / (page_share * pool)
    return speed.turnover_seconds * max(by_slots, by_tokens)
