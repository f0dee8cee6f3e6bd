"""Driver of our own engine: `python evenhand_engine.py SOURCE QUANTIZATION`."""

from __future__ import annotations

import sys

import protocol


def load() -> protocol.Run:
    from benchmarks.cli import _device
    from benchmarks.engine import run_workload
    from benchmarks.workload import BenchmarkRequest
    from engine_actor.build import build_engine
    from serve_app.engine import engine_options
    from serve_app.settings import ModelSettings

    model = ModelSettings(id="default", source=sys.argv[1], quantization=sys.argv[2])  # type: ignore[arg-type]
    built = build_engine(engine_options(model, _device(model)))

    def run(prompts: list[list[int]], limits: list[int]) -> list[int]:
        requests = [BenchmarkRequest("", ids, n) for ids, n in zip(prompts, limits, strict=True)]
        return [len(request.token_ids) for request in run_workload(built, requests).requests]

    return run


if __name__ == "__main__":
    protocol.serve("evenhand", sys.argv[2], load)
