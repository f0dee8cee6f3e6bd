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


class FixedLimits(StepControl):
    """The configured limits and nothing else: what a controller is compared with."""

    def token_budget(self, now: float) -> int | None:
        return None

    def batch_limit(self) -> int:
        return self._scheduler.config.max_num_seqs


def simulate(
    scenario: Scenario,
    policy: QueuePolicy,
    model: CostModel,
    *,
    engines: int = 1,
    prefix_caching: bool = True,
    request_level_batching: bool = False,
    prefill_first: bool = False,
    step_control: bool = True,
    waiting_timeout_s: float | None = None,
    locality_window: float = 0.0,
) -> Run:
    """Run a scenario on `engines` equal engines. The queue has no caps: what a policy does with a flood is seen.
    Without `step_control` the model's limits stand as they are. `locality_window` is in priced tokens per weight.

    Raises ValueError if a request of the scenario can never run on such an engine.
    """
    last_positions: dict[int, int] = {}
    config = SchedulerConfig(
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        prefill_chunk_size=min(model.prefill_chunk_size, model.max_num_batched_tokens),
        prefix_caching=prefix_caching,
        request_level_batching=request_level_batching,
        prefill_first=prefill_first,
    )
    pool = [
        _engine(f"engine-{index}", model, config, last_positions, step_control) for index in range(engines)
    ]
    queue = FairQueue(
        queue_epoch=1,
        policy=policy,
        max_queued_requests=_NO_CAP,
        max_queued_per_tenant=_NO_CAP,
        locality_window=locality_window,
    )
    return Simulation(
        scenario,
        queue,
        pool,
        last_positions,
        waiting_timeout_s=waiting_timeout_s,
        locality_window=locality_window,
    ).run()


def _engine(
    name: str,
    model: CostModel,
    config: SchedulerConfig,
    last_positions: dict[int, int],
    step_control: bool,
) -> SimulatedEngine:
    """As the engine's actor builds one: calibrated before its first request."""
    pages = model.kv_tokens // PAGE_SIZE + 1  # one more: the dummy page
    runner = CostModelRunner(model.step, pages, last_positions)
    scheduler = Scheduler(config, pages)
    kind = StepControl if step_control else FixedLimits
    control = kind(scheduler, calibrate(runner, config, clock=lambda: runner.elapsed))
    return SimulatedEngine(name, scheduler, control, runner)
