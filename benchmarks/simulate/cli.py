"""`evenhand simulate`. Nothing heavy is imported before it runs: help must be quick."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from benchmarks.simulate.cost_models import CostModel
    from benchmarks.simulate.requests import Scenario


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario's name, or a trace file (.csv, .jsonl).")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Order of the fair queue: vtc, fcfs, rpm, lcf, drr or dlpm.")
    ] = "vtc",
    cost_model: Annotated[
        str, typer.Option(help="Hardware and model: a10g-7b, a100-7b, h200-8b, cpu.")
    ] = "a10g-7b",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw service and service gap over time into this file.")
    ] = None,
    engines: Annotated[int, typer.Option(help="Equal engines in the pool.", min=1)] = 1,
    speed: Annotated[float, typer.Option(help="Arrivals come this much faster.", min=0.001, max=1000)] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)] = None,
    tenants: Annotated[
        int | None, typer.Option(help="Spread the requests over so many tenants by Zipf's law.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random draws.")] = 0,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at once.", min=1)] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step.", min=16)
    ] = None,
    prefill_chunk_size: Annotated[
        int | None, typer.Option(help="One request's tokens in a step.", min=1)
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="KV pool of an engine, in tokens.", min=32)] = None,
    waiting_timeout_s: Annotated[
        float | None, typer.Option(help="Refuse what has waited this long; never without it.", min=0.1)
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Use the prefix cache.")] = True,
    request_level_batching: Annotated[
        bool, typer.Option("--request-level-batching", help="Start no request before all running ones ended.")
    ] = False,
    prefill_first: Annotated[
        bool, typer.Option("--prefill-first", help="No decode in a step that has prompts to compute.")
    ] = False,
    step_control: Annotated[
        bool, typer.Option(help="Let the engine choose batch and step sizes below its limits.")
    ] = True,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Target of every request: time to first token.", min=1)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="Target of every request: mean time per further token.", min=1)
    ] = None,
    kv_share: Annotated[
        float | None,
        typer.Option(
            help="Part of the KV pages that each tenant may hold while others wait.", min=0.001, max=1
        ),
    ] = None,
    locality_window: Annotated[
        float,
        typer.Option(help="How far, in tokens of service, a cached prefix may go before its turn.", min=0),
    ] = 0.0,
    to_completion: Annotated[
        bool,
        typer.Option("--to-completion", help="Run until every request has ended, also where others end."),
    ] = False,
    list_scenarios: Annotated[bool, typer.Option("--list", help="List the scenarios by name.")] = False,
) -> None:
    """Run a scenario on the product's own fair queue and scheduler, in virtual time over a cost model."""
    from benchmarks.plot_file import check_plot
    from benchmarks.simulate.build import simulate as run_simulation
    from benchmarks.simulate.plot import plot as draw
    from benchmarks.simulate.results import results, table
    from benchmarks.simulate.scenarios import SCENARIOS
    from benchmarks.workload import BenchmarkError
    from policies.fair_queue import QUEUE_POLICIES

    if list_scenarios:
        typer.echo("\n".join(SCENARIOS))
        return
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "prefill_chunk_size": prefill_chunk_size,
        "kv_tokens": kv_tokens,
    }
    try:
        order = next((known for known in QUEUE_POLICIES if known == policy), None)
        if order is None:
            allowed = ", ".join(QUEUE_POLICIES)
            raise BenchmarkError(f"--policy: {policy!r} is not allowed; allowed: {allowed}")
        model = _cost_model(cost_model, limits)
        if plot is not None:
            check_plot(plot)
        chosen = _scenario(scenario, seed, speed, limit, tenants)
        if to_completion:
            chosen = replace(chosen, horizon_s=None)
        targets = {"slo_ttft_s": slo_ttft_ms, "slo_tpot_s": slo_tpot_ms}
        given: dict[str, Any] = {name: value / 1e3 for name, value in targets.items() if value is not None}
        if kv_share is not None:
            given["kv_share"] = kv_share
        chosen = replace(chosen, requests=tuple(replace(request, **given) for request in chosen.requests))
        try:
            run = run_simulation(
                chosen,
                order,
                model,
                engines=engines,
                prefix_caching=prefix_cache,
                request_level_batching=request_level_batching,
                prefill_first=prefill_first,
                step_control=step_control,
                waiting_timeout_s=waiting_timeout_s,
                locality_window=locality_window,
            )
        except ValueError as error:
            raise BenchmarkError(str(error)) from None
        if plot is not None:
            draw(plot, f"{chosen.name}, {model.name}, {policy}", run)
    except BenchmarkError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    report = {"scenario": chosen.name, "cost_model": model.name, **results(policy, run)}
    typer.echo(json.dumps(report) if as_json else table(report))


def _cost_model(name: str, limits: dict[str, Any]) -> CostModel:
    from benchmarks.simulate.cost_models import COST_MODELS
    from benchmarks.workload import BenchmarkError

    if name not in COST_MODELS:
        raise BenchmarkError(f"--cost-model: {name!r} is not allowed; allowed: {', '.join(COST_MODELS)}")
    return replace(COST_MODELS[name](), **{key: value for key, value in limits.items() if value is not None})


def _scenario(name: str | None, seed: int, speed: float, limit: int | None, tenants: int | None) -> Scenario:
    from benchmarks.simulate.scenarios import SCENARIOS, spread
    from benchmarks.simulate.scenarios import scenario as make
    from benchmarks.simulate.traces import read_trace
    from benchmarks.workload import BenchmarkError

    if name is None:
        raise BenchmarkError(f"SCENARIO is missing; allowed: a trace file, or {', '.join(SCENARIOS)}")
    if name in SCENARIOS:
        chosen = SCENARIOS[name](seed)
    elif Path(name).suffix in (".csv", ".jsonl"):
        chosen = make(name, read_trace(Path(name)))
    else:
        raise BenchmarkError(
            f"SCENARIO: {name!r} is not allowed; allowed: a trace file (.csv, .jsonl), or {', '.join(SCENARIOS)}"
        )
    requests = list(chosen.requests[:limit])
    if tenants is not None:
        requests = spread(requests, tenants, seed)
    if speed != 1.0:
        requests = [replace(request, arrival_s=request.arrival_s / speed) for request in requests]
    horizon = None if chosen.horizon_s is None else chosen.horizon_s / speed
    return make(chosen.name, requests, horizon)
