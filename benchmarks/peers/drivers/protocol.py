"""What a driver says to the comparison: JSON lines. Standard library alone, because it runs in other environments.

A driver loads its engine, writes {"ready": true, "engine": NAME, "detail": TEXT}, and then answers each line
{"requests": [{"ids": [...], "max_tokens": n}, ...]} with {"seconds": s, "output_tokens": [...],
"decode_tokens_per_s": rate or null}: all requests handed over at once, greedy, end tokens ignored, so that every
request runs to its max_tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Answer:
    """The tokens generated for each request. `seconds` is measured here unless an engine measures itself;
    `decode_tokens_per_s` is the rate of the steps that computed no prompt, where an engine tells it."""

    output_tokens: list[int]
    seconds: float | None = None
    decode_tokens_per_s: float | None = None


Run = Callable[[list[list[int]], list[int]], Answer]
"""(prompts as token ids, max_tokens of each) to what came out of it."""


def serve(engine: str, detail: str, load: Callable[[], Run]) -> None:
    """The whole life of a driver. What an engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run = load()

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    say({"ready": True, "engine": engine, "detail": detail})
    for line in sys.stdin:
        requests = json.loads(line)["requests"]
        prompts, limits = [r["ids"] for r in requests], [r["max_tokens"] for r in requests]
        started = time.perf_counter()
        answer = run(prompts, limits)
        if answer.seconds is None:
            answer.seconds = time.perf_counter() - started
        say(asdict(answer))
