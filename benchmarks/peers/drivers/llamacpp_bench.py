"""Driver of llama.cpp's own batched benchmark: `python llamacpp_bench.py BINARY MODEL.gguf THREADS`.

It computes prompts of its own, all of one length, then decodes them together without sampling: the requests must be
of one shape, and only their number and lengths are used. Loading the model is not in its seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys

import protocol


def load() -> protocol.Run:
    binary, model, threads = sys.argv[1:4]

    def run(prompts: list[list[int]], limits: list[int]) -> protocol.Answer:
        count, length, limit = len(prompts), len(prompts[0]), limits[0]
        if any(len(prompt) != length for prompt in prompts) or any(n != limit for n in limits):
            sys.exit("llama-batched-bench needs requests of one prompt length and one max_tokens")
        sizes = {"-npp": length, "-ntg": limit, "-npl": count, "-c": count * (length + limit), "-t": threads}
        options = [str(part) for pair in sizes.items() for part in pair]
        output = subprocess.run(
            [binary, "-m", model, *options, "--output-format", "jsonl"], stdout=subprocess.PIPE, check=True
        ).stdout
        figures = next(json.loads(line) for line in output.splitlines() if line.startswith(b"{"))
        return protocol.Answer(limits, seconds=figures["t"], decode_tokens_per_s=figures["speed_tg"])

    return run


if __name__ == "__main__":
    protocol.serve("llama-batched-bench", sys.argv[2].rsplit("/", 1)[-1], load)
