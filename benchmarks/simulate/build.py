"""From a cost model to a queue and engines ready to run a scenario."""

from __future__ import annotations

from benchmarks.simulate.cost_models import CostModel
from benchmarks.simulate.requests import Scenario
from benchmarks.simulate.runner import CostModelRunner
from benchmarks.simulate.simulation import Run, SimulatedEngine, Simulation
from engine_actor.calibration import calibrate
from engine_actor.executor import PAGE_SIZE
from engine_actor.scheduler import Scheduler, SchedulerConfig
from engine_actor.step_control import StepControl
from policies.fair_queue import FairQueue, QueuePolicy

_NO_CAP = 1_000_000


def simulate(
    scenario: Scenario,
    policy: QueuePolicy,
    model: CostModel,
    *,
    engines: int = 1,
    prefix_caching: bool = True,
    waiting_timeout_s: float | None = None,
) -> Run:
    """Run a scenario on `engines` equal engines. The queue has no caps: what a policy does with a flood is seen.

    Raises ValueError if a request of the scenario can never run on such an engine.
    """
    last_positions: dict[int, int] = {}
    config = SchedulerConfig(
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        prefill_chunk_size=min(model.prefill_chunk_size, model.max_num_batched_tokens),
        prefix_caching=prefix_caching,
    )
    pool = [_engine(f"engine-{index}", model, config, last_positions) for index in range(engines)]
    queue = FairQueue(
        queue_epoch=1, policy=policy, max_queued_requests=_NO_CAP, max_queued_per_tenant=_NO_CAP
    )
    return Simulation(scenario, queue, pool, last_positions, waiting_timeout_s=waiting_timeout_s).run()


def _engine(
    name: str, model: CostModel, config: SchedulerConfig, last_positions: dict[int, int]
) -> SimulatedEngine:
    """As the engine's actor builds one: calibrated before its first request."""
    pages = model.kv_tokens // PAGE_SIZE + 1  # one more: the dummy page
    runner = CostModelRunner(model.step, pages, last_positions)
    scheduler = Scheduler(config, pages)
    control = StepControl(scheduler, calibrate(runner, config, clock=lambda: runner.elapsed))
    return SimulatedEngine(name, scheduler, control, runner)
