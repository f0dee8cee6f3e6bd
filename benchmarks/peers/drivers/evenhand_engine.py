"""Driver of our own engine: `python evenhand_engine.py SOURCE QUANTIZATION BUDGET cache|no-cache`.

BUDGET is the token budget of a step, or "default".
"""

from __future__ import annotations

import sys

import protocol


def load() -> protocol.Run:
    from dataclasses import replace

    from benchmarks.cli import _device
    from benchmarks.engine import run_workload
    from benchmarks.figures import decode
    from benchmarks.workload import BenchmarkRequest
    from engine_actor.build import build_engine
    from engine_actor.scheduler import Scheduler
    from serve_app.engine import engine_options
    from serve_app.settings import ModelSettings

    source, quantization, budget, cache = sys.argv[1:5]
    limits = {} if budget == "default" else {"max_num_batched_tokens": int(budget)}
    model = ModelSettings.model_validate(
        {"id": "default", "source": source, "quantization": quantization, "scheduler": limits}
    )
    options = engine_options(model, _device(model))
    built = build_engine(replace(options, prefix_caching=cache == "cache"))
    kept = Scheduler(built.scheduler, built.runner.num_pages) if cache == "cache" else None

    def run(prompts: list[list[int]], limits: list[int]) -> protocol.Answer:
        requests = [BenchmarkRequest("", ids, n) for ids, n in zip(prompts, limits, strict=True)]
        log = run_workload(built, requests, scheduler=kept)
        rate = (decode(log) or {}).get("output_tokens_per_s")
        return protocol.Answer([len(request.token_ids) for request in log.requests], decode_tokens_per_s=rate)

    return run


if __name__ == "__main__":
    protocol.serve("evenhand", sys.argv[2], load)
