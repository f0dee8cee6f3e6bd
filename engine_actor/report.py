"""What an engine tells its fair queue after a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_actor.executor import PAGE_SIZE
from engine_actor.message_socket import fields_of, pack, unpack
from engine_actor.scheduler import Scheduler
from engine_actor.step_control import StepControl
from policies.latency_model import StepEstimate
from policies.memory import estimate_peak_tokens
from policies.tickets import EngineReport


def engine_report(
    engine: str,
    scheduler: Scheduler,
    control: StepControl,
    *,
    accepted: tuple[tuple[str, int], ...] = (),
    draining: bool = False,
) -> EngineReport:
    """The state of the scheduler of `engine`. `accepted` names the tickets taken since the report before.

    Empties the scheduler's lists of first tokens, completed sequences and changes of the prefix cache.
    """
    config = scheduler.config
    held, remaining = scheduler.state.held_and_remaining()
    first_tokens, completed = tuple(scheduler.first_tokens), tuple(scheduler.completed)
    scheduler.first_tokens.clear()
    scheduler.completed.clear()
    added, removed = scheduler.cache.take_changes()
    return EngineReport(
        engine=engine,
        engine_epoch=scheduler.epoch,
        step=scheduler.step,
        served=dict(scheduler.served),
        outstanding=scheduler.state.outstanding(),
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        waiting_prefill_tokens=scheduler.state.waiting_prefill_tokens(),
        max_num_seqs=control.batch_limit(),
        max_num_batched_tokens=config.max_num_batched_tokens,
        free_pages=scheduler.state.unclaimed_pages(),
        total_pages=scheduler.cache.total,
        page_size=PAGE_SIZE,
        accepted=accepted,
        draining=draining,
        live_sequences=scheduler.state.live_sequences(),
        tenant_pages=scheduler.state.tenant_pages(),
        tenant_prefill_tokens=scheduler.state.tenant_prefill_tokens(),
        first_tokens=first_tokens,
        completed=completed,
        step_estimate=control.estimate,
        decode_step_seconds=control.take_decode_step(),
        decode_context=scheduler.state.decode_context(),
        peak_kv_tokens=estimate_peak_tokens(held, remaining),
        remaining=scheduler.state.predicted_ends(),
        page_hashes_added=added,
        page_hashes_removed=removed,
    )


def untold_service(report: EngineReport, told: dict[str, float]) -> EngineReport:
    """The report without the service of tenants that has not changed since it was `told`, which is brought up to date:
    an engine serves few of all the tenants that it has ever seen at a time."""
    changed = {name: total for name, total in report.served.items() if told.get(name) != total}
    told.update(changed)
    return replace(report, served=changed)


def with_events_of(older: EngineReport, newer: EngineReport) -> EngineReport:
    """The newer of two reports of one engine, with what happened since before the older one."""
    added, removed = set(newer.page_hashes_added), set(newer.page_hashes_removed)
    return replace(
        newer,
        accepted=older.accepted + newer.accepted,
        first_tokens=older.first_tokens + newer.first_tokens,
        completed=older.completed + newer.completed,
        page_hashes_added=tuple(set(older.page_hashes_added) - removed | added),
        page_hashes_removed=tuple(set(older.page_hashes_removed) - added | removed),
    )


def pack_report(report: EngineReport) -> bytes:
    """A report for the way to the fair queue."""
    return pack(fields_of(report))


def unpack_report(data: bytes) -> EngineReport:
    """The report of `pack_report`."""
    report = EngineReport(*unpack(data))
    estimate: Any = report.step_estimate
    return report if estimate is None else replace(report, step_estimate=StepEstimate(*estimate))


def same_load(older: EngineReport, newer: EngineReport) -> bool:
    """Between the two nothing came, began to answer or ended, no prompt was computed, and no limit has moved."""
    if newer.accepted or newer.first_tokens or newer.completed:
        return False
    return _load(older) == _load(newer)


def _load(report: EngineReport) -> tuple[object, ...]:
    return (
        report.running,
        report.waiting,
        report.waiting_prefill_tokens,
        report.max_num_seqs,
        report.draining,
        report.live_sequences,
    )
