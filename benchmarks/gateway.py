"""What everything in front of an engine costs: the real server with the stub engine, measured from outside.

`added_ms` is the client's time to first token minus what the engine itself took, from the moment the request was
handed to it to its first token. The CPU figure is that of all processes of the server per streamed token, beside
that of a generator in the answering process (`benchmarks.local_generator`), streamed at the same pace by the same
server, and that of the same scheduler and stub in one process without any server.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.server import RunningServer, running_server
from benchmarks.stream_load import END, EVENT, StreamLoad, http_request, stream_load
from benchmarks.workload import BenchmarkError

PROBE_TOKENS, STREAM_TOKENS = 4, 400
PROMPT = "Measured from outside, token by token. " * 4
KEY = "eh_alpha_bench"
_AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
_SEGMENTS = ("auth", "tokenise", "reserve", "queue", "submit")
_LONGEST_PAUSE_SECONDS = 0.05
_WARM_UP_PROBES = 10
_WARM_UP_SECONDS = 3.0
_LOG_SECONDS = 5.0
_TIMEOUT_SECONDS = 60.0


def run(streams: int, probes: int, seconds: float) -> dict[str, Any]:
    """`streams` are kept going while `probes` requests measure, one after another, and then for `seconds` alone.

    Raises BenchmarkError.
    """
    with running_server(_config(streams)) as server:
        _time_to_first_token(server.port, _request("cold", PROBE_TOKENS))
        with stream_load(
            server.port, "/v1/completions", _AUTHORIZATION, _body(STREAM_TOKENS), streams
        ) as load:
            load.run_for(_WARM_UP_SECONDS)
            _probe(server, load, _WARM_UP_PROBES)
            ttft_ms = _probe(server, load, probes)
            spent = _spend(server, load, seconds, STREAM_TOKENS / (STREAM_TOKENS + 1))
        pace = {"max_tokens": STREAM_TOKENS, "step_seconds": streams / spent["tokens_per_s"]}
        with stream_load(server.port, "/local/stream", {}, pace, streams) as load:
            load.run_for(_WARM_UP_SECONDS)
            bare = _spend(server, load, seconds, 1.0)
        logged = _access_log(server, set(ttft_ms))
    added: list[float] = []
    segments: dict[str, list[float]] = {name: [] for name in (*_SEGMENTS, "stream")}
    for request, ttft in ttft_ms.items():
        stages = logged[request]["stages_ms"]
        added.append(ttft - stages["engine"])
        for name in _SEGMENTS:
            segments[name].append(stages[name])
        segments["stream"].append(added[-1] - sum(stages[name] for name in _SEGMENTS))
    whole, local = spent["cpu_s_per_token"], bare["cpu_s_per_token"]
    return {
        "streams": streams,
        "probes": len(added),
        "added_ms": _percentiles(added),
        "segments": {name: _percentiles(values) for name, values in segments.items()},
        "streamed_tokens_per_s": round(spent["tokens_per_s"]),
        "streamed_tokens_per_cpu_s": round(1 / whole),
        "cpu_s_per_1000_tokens": {
            "server": round(1000 * whole, 4),
            "local_generator": round(1000 * local, 4),
            "added": round(1000 * (whole - local), 4),
            "engine_without_server": round(1000 * _engine_cpu_per_token(streams), 4),
        },
        "cpu_s_per_1000_tokens_by_process": spent["by_process"],
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
            },
            {
                "name": "local",
                "route_prefix": "/local",
                "import_path": "benchmarks.local_generator:build",
                "args": {},
            },
        ],
    }


def _body(max_tokens: int) -> dict[str, Any]:
    return {
        "model": "default",
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }


def _request(name: str, max_tokens: int) -> bytes:
    return http_request("/v1/completions", {**_AUTHORIZATION, "X-Request-Id": name}, _body(max_tokens))


def _probe(server: RunningServer, load: StreamLoad, probes: int) -> dict[str, float]:
    """Time to first token of each probe in ms, by request id. They come at random, not in step with the tokens."""
    ttft_ms: dict[str, float] = {}
    pauses = np.random.default_rng(0).uniform(0.0, _LONGEST_PAUSE_SECONDS, probes)
    for number, pause in enumerate(pauses.tolist()):
        load.run_for(pause)
        name = f"probe-{number}"
        ttft_ms[name] = _time_to_first_token(server.port, _request(name, PROBE_TOKENS))
    return ttft_ms


def _time_to_first_token(port: int, request: bytes) -> float:
    """In ms, from the moment before the request is sent over a new connection, which stands already."""
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS) as connection:
        begin = time.perf_counter()
        connection.sendall(request)
        seen, first = b"", None
        while data := connection.recv(65536):
            seen += data
            if first is None and EVENT in seen:
                first = time.perf_counter()
    if first is None or END not in seen:
        raise BenchmarkError(f"a probe was not answered: {seen[-500:]!r}")
    return (first - begin) * 1e3


def _spend(
    server: RunningServer, load: StreamLoad, seconds: float, tokens_per_event: float
) -> dict[str, Any]:
    """CPU time per streamed token, of the whole server and by process. A chunk with the finish reason has no token."""
    before, events, begin = _cpu_times(server.process), load.events, time.perf_counter()
    load.run_for(seconds)
    after, took = _cpu_times(server.process), time.perf_counter() - begin
    tokens = tokens_per_event * (load.events - events)
    if not tokens:
        raise BenchmarkError("nothing was streamed")
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    largest = sorted(spent, key=lambda name: -spent[name])[:6]
    return {
        "tokens_per_s": tokens / took,
        "cpu_s_per_token": sum(spent.values()) / tokens,
        "by_process": {name: round(1000 * spent[name] / tokens, 4) for name in largest},
    }


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


def _engine_cpu_per_token(streams: int) -> float:
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
