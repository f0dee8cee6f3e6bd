"""What everything in front of an engine costs: the real server with the stub engine, measured from outside.

`added_ms` is the client's time to first token minus what the engine itself took from accepting the request to its
first token. The CPU figure is that of all processes of the server per streamed token, beside that of the same
scheduler and stub driven in one process without a server.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.server import RunningServer, running_server
from benchmarks.workload import BenchmarkError

PROBE_TOKENS, STREAM_TOKENS = 4, 400
PROMPT = "Measured from outside, token by token. " * 4
KEY = "eh_alpha_bench"
_SEGMENTS = ("auth", "tokenise", "reserve", "queue", "submit")
_WARM_UP_SECONDS = 3.0
_LOG_SECONDS = 5.0


def run(streams: int, probes: int, seconds: float) -> dict[str, Any]:
    """`streams` are kept going while `probes` requests measure, one after another, and then for `seconds` alone.

    Raises BenchmarkError.
    """
    with running_server(_config(streams)) as server:
        seen = asyncio.run(_measure(server, streams, probes, seconds))
        logged = _access_log(server, set(seen["ttft_ms"]))
    added: list[float] = []
    segments: dict[str, list[float]] = {name: [] for name in (*_SEGMENTS, "stream")}
    for request, ttft in seen["ttft_ms"].items():
        stages = logged[request]["stages_ms"]
        added.append(ttft - stages["engine"])
        for name in _SEGMENTS:
            segments[name].append(stages[name])
        segments["stream"].append(added[-1] - sum(stages[name] for name in _SEGMENTS))
    tokens, cpu = seen["tokens"], seen["cpu_seconds"]
    local = _local_cpu_per_token(streams)
    return {
        "streams": streams,
        "probes": len(added),
        "added_ms": _percentiles(added),
        "segments": {name: _percentiles(values) for name, values in segments.items()},
        "streamed_tokens_per_s": round(tokens / seen["seconds"]),
        "streamed_tokens_per_cpu_s": round(tokens / cpu),
        "cpu_s_per_1000_tokens": {
            "server": round(1000 * cpu / tokens, 4),
            "local_generator": round(1000 * local, 4),
            "added": round(1000 * (cpu / tokens - local), 4),
        },
        "cpu_share_by_process": seen["cpu_by_process"],
    }


def _config(streams: int) -> dict[str, Any]:
    limits = {"requests_per_minute": 100_000, "max_concurrent_requests": 10_000}
    model = {
        "id": "default",
        "source": "stub",
        "engine": "stub",
        "scheduler": {"max_num_seqs": streams + 8, "max_num_batched_tokens": max(256, 2 * streams)},
    }
    gateway = {"tenants": [{"id": "alpha", "api_keys": [KEY], "limits": limits}]}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 0},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "evenhand",
                "route_prefix": "/",
                "import_path": "serve_app.app:build",
                "args": {"models": [model]},
                "deployments": [{"name": "Gateway", "user_config": gateway}],
            }
        ],
    }


async def _measure(server: RunningServer, streams: int, probes: int, seconds: float) -> dict[str, Any]:
    client = _Client(server.port)
    running = [asyncio.create_task(client.keep_streaming()) for _ in range(streams)]
    ttft_ms: dict[str, float] = {}
    try:
        await _unless_failed(running, asyncio.sleep(_WARM_UP_SECONDS))
        for number in range(-10, probes):  # the first ten warm up
            name = f"probe-{number}"
            took = await _unless_failed(running, client.ask(name, PROBE_TOKENS))
            if number >= 0:
                ttft_ms[name] = took
        before, tokens, begin = _cpu_times(server.process), client.tokens, time.perf_counter()
        await _unless_failed(running, asyncio.sleep(seconds))
        after, tokens, took = _cpu_times(server.process), client.tokens - tokens, time.perf_counter() - begin
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    total = sum(spent.values())
    largest = sorted(spent, key=lambda name: -spent[name])[:6]
    return {
        "ttft_ms": ttft_ms,
        "tokens": tokens,
        "seconds": took,
        "cpu_seconds": total,
        "cpu_by_process": {name: round(spent[name] / total, 3) for name in largest},
    }


async def _unless_failed(running: list[asyncio.Task[None]], work: Any) -> Any:
    """The result of `work`. Raises what a stream ended with, if one does first."""
    wanted = asyncio.ensure_future(work)
    await asyncio.wait({wanted, *running}, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done():
            wanted.cancel()
            task.result()
    return await wanted


class _Client:
    """Plain sockets and no parsing of JSON: what is measured shares its two cores with us."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.tokens = 0

    async def keep_streaming(self) -> None:
        while True:
            await self.ask("stream", STREAM_TOKENS)

    async def ask(self, name: str, max_tokens: int) -> float:
        """One streamed completion; its time to first token in ms, from before it is sent."""
        body = json.dumps(
            {
                "model": "default",
                "prompt": PROMPT,
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        begin, first = time.perf_counter(), 0.0
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
            b"X-Request-Id: "
            + name.encode()
            + b"\r\nContent-Length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        try:
            tail = b""
            while data := await reader.read(65536):
                events = data.count(b"data: {")
                if events and not first:
                    first = time.perf_counter()
                self.tokens += events
                tail = (tail + data)[-64:]
            if b"data: [DONE]" not in tail:
                raise BenchmarkError(f"a stream broke off: {tail!r}")
            self.tokens -= 1  # the chunk with the finish reason has no token
        finally:
            writer.close()
        return (first - begin) * 1e3


def _cpu_times(process: psutil.Process) -> dict[str, float]:
    """CPU seconds of every process of the server so far, by title."""
    times: dict[str, float] = {}
    for one in [process, *process.children(recursive=True)]:
        try:
            used, title = one.cpu_times(), (one.cmdline() or [one.name()])[0]
        except psutil.Error:
            continue
        name = title.rpartition("/")[2] if "::" not in title else title
        times[name] = times.get(name, 0.0) + used.user + used.system
    return times


def _access_log(server: RunningServer, names: set[str]) -> dict[str, Any]:
    """The lines of these requests; they are written just after the answers have gone out."""
    path = server.directory / "data" / "logs" / "access.jsonl"
    deadline = time.monotonic() + _LOG_SECONDS
    while True:
        lines = [json.loads(line) for line in path.read_text().splitlines() if '"probe-' in line]
        found = {line["request"]: line for line in lines if line["outcome"] == "ok"}
        if names <= set(found):
            return found
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{len(names - set(found))} requests are not in the access log")
        time.sleep(0.1)


def _local_cpu_per_token(streams: int) -> float:
    """CPU seconds per token of the same scheduler and stub engine in this process."""
    from benchmarks.engine import run_workload
    from benchmarks.workload import BenchmarkRequest
    from engine_actor.build import EngineOptions, build_engine

    options = EngineOptions(
        source="stub", engine="stub", max_num_seqs=streams + 8, max_num_batched_tokens=max(256, 2 * streams)
    )
    built = build_engine(options)
    prompt = list(PROMPT.encode())
    requests = [BenchmarkRequest("benchmark", prompt, STREAM_TOKENS) for _ in range(streams)]
    begin = time.process_time()
    run_workload(built, requests)
    return (time.process_time() - begin) / (streams * STREAM_TOKENS)


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
