"""A noisy neighbour: what one tenant's flood does to another's time to first token, over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import numpy as np

from benchmarks.server import running_server

CHECK_INTERVAL_SECONDS = 1.5
CHECK_INPUT, CHECK_OUTPUT = 32, 16
_TOKEN_IDS = (100, 49_000)
"""Ordinary tokens of the default model."""
_MARGIN_SECONDS = 3.0
"""The flood is on for so long before the victim is measured: every slot is taken then."""
HOPELESS_CALLS, HOPELESS_TTFT_MS = 100, 500
"""The aggressor's calls with a deadline that its own backlog makes unattainable."""
_HOPELESS_INTERVAL_SECONDS = 0.1


@dataclass(frozen=True)
class Load:
    """The aggressor: `in_flight` requests kept going, each of so many tokens in and out."""

    in_flight: int
    input_tokens: int
    output_tokens: int


@dataclass
class Calls:
    """What came of one tenant's requests: times to first token in seconds, and tokens as they arrived.

    A prompt counts when its first token is there.
    """

    ttft: list[float] = field(default_factory=list)
    ok: int = 0
    failed: int = 0
    tokens: int = 0

    def ttft_ms(self) -> dict[str, float] | None:
        """None if no request was answered."""
        return _percentiles_ms(self.ttft)


def _percentiles_ms(seconds: list[float]) -> dict[str, float] | None:
    """None if there are none."""
    if not seconds:
        return None
    p50, p95, largest = (np.percentile(seconds, [50, 95, 100]) * 1000).tolist()
    return {"p50": round(p50, 1), "p95": round(p95, 1), "max": round(largest, 1)}


async def _call(
    client: httpx.AsyncClient, key: str, prompt: list[int], output_tokens: int, calls: Calls
) -> None:
    """One streamed completion of random tokens: no prefix of it is in any cache."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    started, received = time.perf_counter(), 0
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                usage = json.loads(line[6:])["usage"]
                if not received:
                    calls.ttft.append(time.perf_counter() - started)
                    calls.tokens += len(prompt)
                calls.tokens += usage["completion_tokens"] - received
                received = usage["completion_tokens"]
        calls.ok += 1
    except (httpx.HTTPError, KeyError):  # an error event has no usage
        calls.failed += 1


async def _victim(client: httpx.AsyncClient, key: str, random: Random, seconds: float) -> Calls:
    """A request every 1.5 s, whether or not the one before has ended."""
    calls, tasks = Calls(), []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        prompt = _prompt(random, CHECK_INPUT)
        tasks.append(asyncio.create_task(_call(client, key, prompt, CHECK_OUTPUT, calls)))
        await asyncio.sleep(CHECK_INTERVAL_SECONDS)
    await asyncio.gather(*tasks)
    return calls


async def _aggressor(client: httpx.AsyncClient, key: str, random: Random, load: Load, calls: Calls) -> None:
    """One of the flood's `in_flight` clients: the next request when the last has ended, until cancelled."""
    while True:
        before = calls.failed
        await _call(client, key, _prompt(random, load.input_tokens), load.output_tokens, calls)
        if calls.failed > before:
            await asyncio.sleep(0.1)


async def _hopeless(client: httpx.AsyncClient, key: str, random: Random, load: Load) -> list[float]:
    """Calls behind the flood's backlog that want their first token too soon, one each 0.1 s.

    Returns the seconds from sending to the whole answer of those whose deadline was refused. The others, as under a
    policy without deadlines, are given up.
    """
    refusals: list[float] = []

    async def call(prompt: list[int]) -> None:
        body = {"model": "default", "prompt": prompt, "max_tokens": load.output_tokens}
        headers = {"Authorization": f"Bearer {key}", "x-slo-ttft-ms": str(HOPELESS_TTFT_MS)}
        started = time.perf_counter()
        answer = await client.post("/v1/completions", json=body, headers=headers)
        if answer.status_code == 503 and answer.json()["error"]["code"] == "deadline_unattainable":
            refusals.append(time.perf_counter() - started)

    tasks = []
    for _ in range(HOPELESS_CALLS):
        tasks.append(asyncio.create_task(call(_prompt(random, load.input_tokens))))
        await asyncio.sleep(_HOPELESS_INTERVAL_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return refusals


def _prompt(random: Random, tokens: int) -> list[int]:
    return [random.randrange(*_TOKEN_IDS) for _ in range(tokens)]


async def _measure(base_url: str, load: Load, seconds: float, seed: int) -> dict[str, Any]:
    random = Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=300, limits=limits) as client:
        await _victim(client, "eh_beta_demo", random, CHECK_INTERVAL_SECONDS)  # connections and kernels warm
        alone = await _victim(client, "eh_beta_demo", random, seconds / 2)
        flood = Calls()
        flooding = [
            asyncio.create_task(_aggressor(client, "eh_alpha_demo", random, load, flood))
            for _ in range(load.in_flight)
        ]
        await asyncio.sleep(_MARGIN_SECONDS)
        tokens, started = flood.tokens, time.perf_counter()
        flooded = await _victim(client, "eh_beta_demo", random, seconds)
        elapsed = time.perf_counter() - started
        tokens = flood.tokens - tokens
        refusals = await _hopeless(client, "eh_alpha_demo", random, load)
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    return {
        "victim_alone_ttft_ms": alone.ttft_ms(),
        "victim_flooded_ttft_ms": flooded.ttft_ms(),
        "victim_calls": flooded.ok,
        "victim_failed": alone.failed + flooded.failed,
        "aggressor_calls": flood.ok,
        "aggressor_failed": flood.failed,
        "aggressor_tokens_per_s": round(tokens / elapsed, 1),
        "refusals": {"sent": HOPELESS_CALLS, "refused": len(refusals), "ms": _percentiles_ms(refusals)},
    }


def run(config: dict[str, Any], policies: list[str], load: Load, seconds: float) -> dict[str, Any]:
    """The same load under each policy, one server after another."""
    results = {}
    application = config["applications"][0]
    for policy in policies:
        application["args"]["models"][0]["scheduler"]["policy"] = policy
        with running_server(config) as server:
            results[policy] = asyncio.run(_measure(server.base_url, load, seconds, seed=1))
    return {
        "aggressor": {"in_flight": load.in_flight, "input": load.input_tokens, "output": load.output_tokens},
        "victim": {"input": CHECK_INPUT, "output": CHECK_OUTPUT, "every_s": CHECK_INTERVAL_SECONDS},
        "seconds": seconds,
        "policies": results,
    }
