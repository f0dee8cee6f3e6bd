"""What a run shows: rates, service gap, times, deadlines, per tenant and in all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.simulate.simulation import RequestOutcome, Run
from engine_actor.executor import PAGE_SIZE
from policies.engine_shares import kv_unit
from policies.queue_order import INTERACTIVE_LEAD
from policies.service import DEFAULT_PRICES

_DIGITS = 4


def results(policy: str, run: Run) -> dict[str, Any]:
    """Plain data for JSON. Times in seconds; a figure that does not exist is None.

    `total_tokens_per_s` counts input tokens, computed for the first time or found in the cache, and output tokens.
    `decode_batch_mean` and `kv_utilization_mean` are means over the time in which engines compute, `busy` is the share
    of that time: an order that costs throughput shows there. `attainment_*` is the share of requests with targets that
    met them all, over those offered (refused, cancelled and unfinished ones are misses) and over those granted entry.
    `goodput` is requests per second that completed within the targets they had, if any.
    """
    outcomes = run.outcomes
    schedulers = [engine.scheduler for engine in run.engines]
    cached = sum(scheduler.service.cached_tokens for scheduler in schedulers)
    busy = sum(engine.busy_seconds for engine in run.engines)
    computed = sum(scheduler.service.computed_tokens for scheduler in schedulers)
    targeted = [outcome for outcome in outcomes if outcome.request.has_targets]
    admitted = [outcome for outcome in targeted if outcome.admitted]
    tenants = _by_tenant(outcomes)
    means = [mean for rows in tenants.values() if (mean := _mean(_ttfts(rows))) is not None]
    return {
        "policy": policy,
        "completed": sum(outcome.completed for outcome in outcomes),
        "requests": len(outcomes),
        "seconds": _round(run.seconds),
        "total_tokens_per_s": _round((cached + computed + run.output_tokens) / run.seconds),
        "output_tokens_per_s": _round(run.output_tokens / run.seconds),
        "busy": _round(busy / run.seconds / len(run.engines)),
        "decode_batch_mean": _round(sum(engine.decode_row_seconds for engine in run.engines) / busy),
        "kv_utilization_mean": _round(
            sum(engine.page_seconds / engine.scheduler.cache.total for engine in run.engines) / busy
        ),
        "service_gap_bound": _round(service_gap_bound(run)),
        "service_gap_max": _round(run.gap.max),
        "service_gap_mean": _round(run.gap.mean),
        "jain": _round(run.gap.jain()),
        "median_tenant_ttft_s": _round(median(means)) if means else None,
        "attainment_offered": _share(targeted),
        "attainment_admitted": _share(admitted),
        "goodput": _round(sum(map(meets_targets, outcomes)) / run.seconds),
        "preemptions": sum(scheduler.preemptions for scheduler in schedulers),
        "prefix_hit_rate": _round(cached / (cached + computed)) if cached + computed else None,
        "refusals": _count(outcome.refusal for outcome in outcomes if outcome.refusal is not None),
        "cancelled": sum(outcome.cancelled for outcome in outcomes),
        "steps": sum(scheduler.step for scheduler in schedulers),
        "ttft_s": _percentiles(_ttfts(outcomes)),
        "itl_s": _percentiles(
            np.concatenate([np.diff(outcome.token_times) for outcome in outcomes])
            if outcomes
            else np.empty(0)
        ),
        "e2e_s": _percentiles([e2e for outcome in outcomes if (e2e := outcome.e2e_s) is not None]),
        "tenants": {
            tenant: _tenant(rows, sum(scheduler.served.get(tenant, 0.0) for scheduler in schedulers))
            for tenant, rows in tenants.items()
        },
    }


def service_gap_bound(run: Run) -> float:
    """Most by which the service of two tenants backlogged over the same time may differ, per unit of weight.

    2 * max(w_in * chunk, w_out * M) over the smallest weight, summed over the engines (Sheng et al., OSDI'24, section
    4.1, with prompts charged by the chunk). M is what one tenant can have in flight, in tokens: the KV pool, or its cap
    while others wait, though at least its longest request. With caps two steps' service is added, in which pages beyond
    them are taken back. The locality window is added twice; where interactive requests wait beside others, so is
    their lead.
    """
    requests = [outcome.request for outcome in run.outcomes]
    classes = {request.service_class for request in requests}
    lead = 2.0 * INTERACTIVE_LEAD if classes >= {"interactive", "default"} else 0.0
    smallest = min(request.weight for request in requests)
    cap = _largest_cap({request.tenant: request.kv_share for request in requests})
    longest = max(request.input_tokens + request.output_tokens for request in requests)
    bound = 0.0
    for engine in run.engines:
        config, pool = engine.scheduler.config, engine.scheduler.cache.total * PAGE_SIZE
        chunk = DEFAULT_PRICES.cost(computed_input=config.prefill_chunk_size)
        in_flight = min(pool, max(cap * pool, longest))
        bound += 2.0 * max(chunk, DEFAULT_PRICES.cost(output=int(in_flight)))
        if in_flight < pool:
            bound += 2.0 * DEFAULT_PRICES.cost(
                computed_input=config.max_num_batched_tokens, output=config.max_num_seqs
            )
    return bound / smallest + lead + 2.0 * run.locality_window


def _largest_cap(kv_shares: dict[str, float]) -> float:
    """The largest part of the pages that a tenant may hold while one other is backlogged too."""
    shares = sorted(kv_shares.values())
    if len(shares) < 2:
        return 1.0
    # The cap is raised most beside the least other one.
    return max(share * kv_unit(share + shares[1 if index == 0 else 0]) for index, share in enumerate(shares))


def meets_targets(outcome: RequestOutcome) -> bool:
    """Whether a request completed within every target it had. Without targets, whether it completed."""
    request, ttft, e2e = outcome.request, outcome.ttft_s, outcome.e2e_s
    if not outcome.completed or ttft is None or e2e is None:
        return False
    if request.slo_ttft_s is not None and ttft > request.slo_ttft_s:
        return False
    if request.slo_deadline_s is not None and e2e > request.slo_deadline_s:
        return False
    tokens = len(outcome.token_times)
    return request.slo_tpot_s is None or tokens < 2 or (e2e - ttft) / (tokens - 1) <= request.slo_tpot_s


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{name:<22} {_inline(value)}" for name, value in report.items() if name != "tenants"]
    columns = ("requests", "completed", "service", "ttft_s_mean", "ttft_s_p50", "ttft_s_p95", "e2e_s_mean")
    lines += ["", f"{'tenant':<16}" + "".join(f"{column:>13}" for column in columns)]
    for tenant, row in report["tenants"].items():
        lines.append(f"{tenant:<16}" + "".join(f"{_inline(row[column]):>13}" for column in columns))
    return "\n".join(lines)


def _tenant(rows: Sequence[RequestOutcome], service: float) -> dict[str, Any]:
    ttfts = _ttfts(rows)
    percentiles = _percentiles(ttfts)
    return {
        "weight": rows[0].request.weight,
        "requests": len(rows),
        "completed": sum(row.completed for row in rows),
        "refused": sum(row.refusal is not None for row in rows),
        "service": _round(service),
        "ttft_s_mean": _round(_mean(ttfts)),
        "ttft_s_p50": percentiles["p50"],
        "ttft_s_p95": percentiles["p95"],
        "e2e_s_mean": _round(_mean([e2e for row in rows if (e2e := row.e2e_s) is not None])),
        "attainment_offered": _share([row for row in rows if row.request.has_targets]),
    }


def _by_tenant(outcomes: Sequence[RequestOutcome]) -> dict[str, list[RequestOutcome]]:
    tenants: dict[str, list[RequestOutcome]] = {}
    for outcome in outcomes:
        tenants.setdefault(outcome.request.tenant, []).append(outcome)
    return dict(sorted(tenants.items()))


def _ttfts(outcomes: Iterable[RequestOutcome]) -> list[float]:
    return [ttft for outcome in outcomes if (ttft := outcome.ttft_s) is not None]


def _share(outcomes: Sequence[RequestOutcome]) -> float | None:
    return _round(sum(map(meets_targets, outcomes)) / len(outcomes)) if outcomes else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentiles(values: Any) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("p50", "p95", "p99"))
    return {f"p{level}": _round(float(np.percentile(values, level))) for level in (50, 95, 99)}


def _count(codes: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for code in codes:
        counts[code] = counts.get(code, 0) + 1
    return counts


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {_inline(part)}" for key, part in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)
