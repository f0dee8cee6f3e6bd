"""Scenarios by name: published suites, adversaries, deadlines under overload, and the traces that come along.

Rates are in requests per second. The suites of Sheng et al. (OSDI'24) take rates, lengths and durations from section
5 and from `fair_bench/exp_suite.py` of the artifact; they are made for `a10g-7b`, and so are the adversaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.simulate.requests import Scenario, SimulatedRequest
from benchmarks.simulate.traces import DATA, read_trace

Requests = Iterable[SimulatedRequest]


def uniform(rate: float, begin: float, end: float) -> Iterator[float]:
    """Arrival times at equal distances."""
    for index in range(round((end - begin) * rate)):
        yield begin + index / rate


def poisson(rng: np.random.Generator, rate: float, begin: float, end: float) -> Iterator[float]:
    """Arrival times of a Poisson process."""
    count = rng.poisson(rate * (end - begin))
    yield from sorted(rng.uniform(begin, end, count).tolist())


def stream(
    tenant: str, arrivals: Iterable[float], tokens_in: int, tokens_out: int, weight: float = 1.0
) -> Iterator[SimulatedRequest]:
    """Requests of one tenant, all of the same lengths."""
    for arrival in arrivals:
        yield SimulatedRequest(arrival, tenant, tokens_in, tokens_out, weight=weight)


def scenario(name: str, requests: Requests, horizon_s: float | None = None) -> Scenario:
    """The requests in order of arrival."""
    return Scenario(name, tuple(sorted(requests, key=lambda request: request.arrival_s)), horizon_s)


def constant(
    name: str, rates: Sequence[float], seconds: float, weights: Sequence[float] | None = None
) -> Scenario:
    """Tenants with a constant rate each; 256 tokens in, 256 out."""
    return scenario(
        name,
        (
            request
            for index, rate in enumerate(rates)
            for request in stream(
                f"tenant-{index}", uniform(rate, 0, seconds), 256, 256, weights[index] if weights else 1.0
            )
        ),
        seconds,
    )


def on_off(name: str, interrupted: float, steady: float, seconds: float = 600, phase: float = 60) -> Scenario:
    """One tenant sends every other phase, the other one always; 256 tokens in, 256 out."""
    phases = np.arange(0, seconds, 2 * phase).tolist()
    return scenario(
        name,
        [
            *stream(
                "on-off",
                (t for begin in phases for t in uniform(interrupted, begin, begin + phase)),
                256,
                256,
            ),
            *stream("steady", uniform(steady, 0, seconds), 256, 256),
        ],
        seconds,
    )


def poisson_short_long(seed: int) -> Scenario:
    """Many short requests (64 in, 64 out) against fewer long ones (256, 256)."""
    rng = np.random.default_rng(seed)
    return scenario(
        "vtc_poisson_short_long",
        [
            *stream("short", poisson(rng, 8, 0, 600), 64, 64),
            *stream("long", poisson(rng, 1.5, 0, 600), 256, 256),
        ],
        600,
    )


def ramp(seconds: float = 600) -> Scenario:
    """One tenant's rate rises from 0.2 to 2 while the other one stays at 0.5; 256 tokens in, 256 out."""
    low, high = 0.2, 2.0
    slope = (high - low) / seconds
    count = int((low + high) / 2 * seconds)
    # The n-th arrival is where the integral of the rate reaches n.
    rising = [(-low + (low**2 + 2 * slope * n) ** 0.5) / slope for n in range(count)]
    return scenario(
        "vtc_ramp",
        [*stream("rising", rising, 256, 256), *stream("steady", uniform(0.5, 0, seconds), 256, 256)],
        seconds,
    )


def distribution_shift() -> Scenario:
    """Three phases of 300 s: one tenant on and off below its share against an overloading one; both overload; the
    first goes on overloading and the second comes on and off."""
    first = [
        *(t for begin in (0, 120, 240) for t in uniform(0.5, begin, begin + 60)),
        *uniform(2, 300, 900),
    ]
    second = [
        *uniform(3, 0, 600),
        *(t for begin in (600, 720, 840) for t in uniform(0.5, begin, begin + 60)),
    ]
    return scenario(
        "vtc_dist_shift", [*stream("first", first, 256, 256), *stream("second", second, 256, 256)], 900
    )


def many_tiny(seed: int, seconds: float = 180) -> Scenario:
    """A hundred tiny requests a second against a tenant that overloads with usual ones."""
    rng = np.random.default_rng(seed)
    return scenario(
        "many_tiny",
        [
            *stream("tiny", poisson(rng, 100, 0, seconds), 8, 4),
            *stream("usual", poisson(rng, 1.5, 0, seconds), 256, 256),
        ],
        seconds,
    )


def few_giant(seed: int, seconds: float = 360) -> Scenario:
    """A giant request every two seconds, larger than a quarter of the KV pool, against an overloading usual tenant."""
    rng = np.random.default_rng(seed)
    return scenario(
        "few_giant",
        [
            *stream("giant", uniform(0.5, 0, seconds), 2500, 1000),
            *stream("usual", poisson(rng, 1.5, 0, seconds), 256, 256),
        ],
        seconds,
    )


def cancel_storm(seed: int, seconds: float = 180) -> Scenario:
    """A tenant whose 20 requests a second are given up within two seconds, against one that overloads."""
    rng = np.random.default_rng(seed)
    storm = [
        replace(request, cancel_after_s=float(rng.uniform(0.05, 2.0)))
        for request in stream("storm", poisson(rng, 20, 0, seconds), 256, 256)
    ]
    usual = stream("usual", poisson(rng, 2, 0, seconds), 256, 256)
    return scenario("cancel_storm", [*storm, *usual], seconds)


def deadline_liars(seed: int, seconds: float = 300) -> Scenario:
    """Two tenants with the same load, more than their share; one claims that all of it is urgent."""
    rng = np.random.default_rng(seed)
    liar = [
        replace(request, slo_ttft_s=0.5) for request in stream("liar", poisson(rng, 2, 0, seconds), 256, 256)
    ]
    honest = [
        replace(request, slo_ttft_s=30.0)
        for request in stream("honest", poisson(rng, 2, 0, seconds), 256, 256)
    ]
    return scenario("deadline_liars", [*liar, *honest], seconds)


def prediction_liars(seed: int, seconds: float = 180) -> Scenario:
    """A tenant that teaches short answers and then asks for long ones, again and again, against an overloading usual
    one."""
    rng = np.random.default_rng(seed)
    liar: list[SimulatedRequest] = []
    for begin in np.arange(0, seconds, 10.0).tolist():
        liar += stream("liar", uniform(8, begin, begin + 5), 64, 2)
        liar += stream("liar", uniform(4, begin + 5, begin + 10), 64, 900)
    usual = stream("usual", poisson(rng, 2, 0, seconds), 256, 256)
    return scenario("prediction_liars", [*liar, *usual], seconds)


def hopper(seed: int, seconds: float = 180) -> Scenario:
    """A tenant that comes with 30 requests at once and stays away until they have ended, so that its counter is always
    the last one's, against an overloading usual one."""
    rng = np.random.default_rng(seed)
    bursts = [begin for begin in np.arange(0, seconds, 10.0).tolist() for _ in range(30)]
    usual = stream("usual", poisson(rng, 2, 0, seconds), 256, 256)
    return scenario("hopper", [*stream("hopper", bursts, 256, 256), *usual], seconds)


def many_tenants(seed: int, seconds: float = 180) -> Scenario:
    """Eight new tenants a second with one short request each, against an overloading usual one."""
    rng = np.random.default_rng(seed)
    newcomers = [
        SimulatedRequest(arrival, f"new-{index}", 64, 16)
        for index, arrival in enumerate(poisson(rng, 8, 0, seconds))
    ]
    return scenario(
        "many_tenants",
        [*newcomers, *stream("usual", poisson(rng, 3, 0, seconds), 256, 256)],
        seconds,
    )


def shared_prefixes(seed: int, seconds: float = 180) -> Scenario:
    """Four tenants that overload, each with four long system prompts of its own: more than the KV pool holds at once.

    A prompt is 1,536 shared tokens and 64 of its own; 64 tokens out.
    """
    rng = np.random.default_rng(seed)
    requests: list[SimulatedRequest] = []
    for index in range(4):
        for arrival in poisson(rng, 1.5, 0, seconds):
            first = 3 * (4 * index + int(rng.integers(4)))
            own = 1000 + len(requests)
            blocks = (first, first + 1, first + 2, own)
            requests.append(
                SimulatedRequest(arrival, f"tenant-{index}", 3 * 512 + 64, 64, prefix_blocks=blocks)
            )
    return scenario("shared_prefixes", requests, seconds)


def overload_deadlines(seed: int, rate: float = 4.0, seconds: float = 300) -> Scenario:
    """Three classes with deadlines at twice what `a10g-7b` serves (about 2 requests of this kind a second).

    Two tenants in each class; lognormal lengths of about 140 tokens in and 250 out. Targets: first token within 2 s
    (interactive) or 10 s (default), last token within 120 s (batch).
    """
    rng = np.random.default_rng(seed)
    kinds = (
        ("interactive", 0.4, {"slo_ttft_s": 2.0}),
        ("default", 0.3, {"slo_ttft_s": 10.0}),
        ("batch", 0.3, {"slo_deadline_s": 120.0}),
    )
    requests: list[SimulatedRequest] = []
    for service_class, share, targets in kinds:
        for index in range(2):
            for arrival in poisson(rng, rate * share / 2, 0, seconds):
                requests.append(
                    SimulatedRequest(
                        arrival,
                        f"{service_class}-{index}",
                        input_tokens=int(np.clip(rng.lognormal(np.log(90), 0.9), 4, 1024)),
                        output_tokens=int(np.clip(rng.lognormal(np.log(200), 0.7), 4, 1024)),
                        service_class=service_class,  # type: ignore[arg-type]
                        **targets,  # type: ignore[arg-type]
                    )
                )
    return scenario("overload_deadlines", requests)


def spread(requests: Requests, tenants: int, seed: int) -> list[SimulatedRequest]:
    """The requests of a trace without tenants, given to `tenants` of them by Zipf's law."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, tenants + 1)
    rows = list(requests)
    drawn = rng.choice(tenants, len(rows), p=shares / shares.sum())
    return [replace(row, tenant=f"tenant-{index}") for row, index in zip(rows, drawn.tolist(), strict=True)]


def _trace(name: str, file: str, tenants: int | None = None) -> Callable[[int], Scenario]:
    def make(seed: int) -> Scenario:
        requests = read_trace(DATA / file)
        return scenario(name, requests if tenants is None else spread(requests, tenants, seed))

    return make


SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    "vtc_overload": lambda seed: constant("vtc_overload", (1.5, 3), 360),
    "vtc_overload_multi": lambda seed: constant("vtc_overload_multi", (0.4,) * 3 + (0.6,) * 5, 360),
    "vtc_weighted": lambda seed: constant("vtc_weighted", (0.8, 0.8, 1.2, 1.6), 360, (1, 2, 3, 4)),
    "vtc_proportional": lambda seed: constant("vtc_proportional", (0.25, 0.5, 1.5), 600),
    "vtc_on_off_less": lambda seed: on_off("vtc_on_off_less", 0.5, 2),
    "vtc_on_off_overload": lambda seed: on_off("vtc_on_off_overload", 2, 3),
    "vtc_poisson_short_long": poisson_short_long,
    "vtc_ramp": lambda seed: ramp(),
    "vtc_dist_shift": lambda seed: distribution_shift(),
    "vtc_arena": _trace("vtc_arena", "vtc_arena_clients.csv"),
    "azure_conv": _trace("azure_conv", "azure2023_conv.csv", tenants=8),
    "azure_code": _trace("azure_code", "azure2023_code.csv", tenants=8),
    "mooncake": _trace("mooncake", "mooncake_conversation.jsonl", tenants=8),
    "many_tiny": many_tiny,
    "few_giant": few_giant,
    "cancel_storm": cancel_storm,
    "deadline_liars": deadline_liars,
    "prediction_liars": prediction_liars,
    "hopper": hopper,
    "many_tenants": many_tenants,
    "shared_prefixes": shared_prefixes,
    "overload_deadlines": overload_deadlines,
}
"""Each takes the seed of its random draws, where it has any."""
