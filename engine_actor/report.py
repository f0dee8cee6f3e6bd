"""What an engine tells its fair queue after a step."""

from __future__ import annotations

from engine_actor.executor import PAGE_SIZE
from engine_actor.scheduler import Scheduler
from policies.tickets import EngineReport


def engine_report(
    engine: str, scheduler: Scheduler, *, accepted: tuple[tuple[str, int], ...] = (), draining: bool = False
) -> EngineReport:
    """The state of the scheduler of `engine`. `accepted` names the tickets taken since the report before."""
    config = scheduler.config
    return EngineReport(
        engine=engine,
        engine_epoch=scheduler.epoch,
        step=scheduler.step,
        served=dict(scheduler.served),
        outstanding=scheduler.outstanding(),
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        waiting_prefill_tokens=scheduler.waiting_prefill_tokens(),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        free_pages=scheduler.unclaimed_pages(),
        total_pages=scheduler.cache.total,
        page_size=PAGE_SIZE,
        accepted=accepted,
        draining=draining,
        live_sequences=scheduler.live_sequences(),
        tenant_pages=scheduler.tenant_pages(),
        tenant_prefill_tokens=scheduler.tenant_prefill_tokens(),
    )
