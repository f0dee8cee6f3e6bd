"""Driver of a llama.cpp server: `python llamacpp_engine.py BINARY MODEL.gguf THREADS SLOTS cache|no-cache`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import protocol

START_SECONDS = 120


def load() -> protocol.Run:
    binary, model, threads, slots, cache = sys.argv[1:6]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    subprocess.Popen(
        [binary, "-m", model, "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-np", slots,
         "-c", str(2048 * int(slots)), "--no-webui"],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    base = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{base}/health", timeout=2)
            break
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)

    def one(ids: list[int], limit: int) -> int:
        body = {
            "prompt": ids,
            "n_predict": limit,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": cache == "cache",
        }
        request = urllib.request.Request(
            f"{base}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return int(json.load(response)["tokens_predicted"])

    def run(prompts: list[list[int]], limits: list[int]) -> protocol.Answer:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return protocol.Answer(list(pool.map(one, prompts, limits)))

    return run


if __name__ == "__main__":
    protocol.serve("llama.cpp", sys.argv[2].rsplit("/", 1)[-1], load)
