"""The comparison: every driver is started once, then all run the same requests in turns, one at a time."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.workload import BenchmarkError, BenchmarkRequest, other_prompts

DRIVERS = Path(__file__).parent / "drivers"
START_SECONDS = 900.0


@dataclass(frozen=True)
class Peer:
    """How a driver is started: the interpreter of its environment, its file, its arguments."""

    name: str
    python: str
    driver: str
    arguments: tuple[str, ...]


class Driver:
    """A started driver. Between its turns its processes are stopped, so that no idle thread of it spins."""

    def __init__(self, peer: Peer, log: IO[bytes]) -> None:
        self.peer = peer
        self._process = subprocess.Popen(
            [peer.python, str(DRIVERS / peer.driver), *peer.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def wait_ready(self) -> str:
        """What the engine says of itself. Raises BenchmarkError when it ends instead."""
        return str(self._answer()["detail"])

    def run(self, requests: Sequence[BenchmarkRequest]) -> dict[str, Any]:
        assert self._process.stdin is not None
        message = {"requests": [{"ids": r.prompt_token_ids, "max_tokens": r.max_tokens} for r in requests]}
        self._process.stdin.write(json.dumps(message) + "\n")
        return self._answer()

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"{self.peer.name} ended with code {self._process.wait()}: see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(
    peers: Sequence[Peer], requests: Sequence[BenchmarkRequest], vocab_size: int, repeat: int, log: Path
) -> dict[str, Any]:
    """Run every peer `repeat` times, in turns, after one warm-up each on other prompts. The first peer is ours.

    Figures are output tokens per second of the median run, and ours over the peer's. Raises BenchmarkError when a
    driver fails or generates another number of tokens than asked for.
    """
    drivers: list[Driver] = []
    runs: dict[str, list[float]] = {peer.name: [] for peer in peers}
    details: dict[str, str] = {}
    expected = sum(request.max_tokens for request in requests)
    warm_up = other_prompts(list(requests), vocab_size)
    with log.open("ab") as output:
        try:
            for peer in peers:
                driver = Driver(peer, output)
                drivers.append(driver)
                details[peer.name] = driver.wait_ready()
                driver.run(warm_up)
                driver.signal(signal.SIGSTOP)
            for number in range(repeat):
                # Each round begins with another one: what the machine does meanwhile hits all alike.
                for driver in [*drivers[number % len(drivers) :], *drivers[: number % len(drivers)]]:
                    driver.signal(signal.SIGCONT)
                    answer = driver.run(requests)
                    driver.signal(signal.SIGSTOP)
                    if sum(answer["output_tokens"]) != expected:
                        raise BenchmarkError(
                            f"{driver.peer.name} made {sum(answer['output_tokens'])} tokens, not {expected}"
                        )
                    runs[driver.peer.name].append(expected / answer["seconds"])
                    print(f"{driver.peer.name}: {runs[driver.peer.name][-1]:.1f} tokens/s", file=sys.stderr)
                    time.sleep(0.5)
        finally:
            for driver in drivers:
                driver.stop()
    ours = statistics.median(runs[peers[0].name])
    return {
        "requests": len(requests),
        "input_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": expected,
        "repeat": repeat,
        "engines": {
            name: {
                "detail": details[name],
                "output_tokens_per_s": round(statistics.median(rates), 1),
                "runs": [round(rate, 1) for rate in rates],
                "ours_over_it": round(ours / statistics.median(rates), 2),
            }
            for name, rates in runs.items()
        },
    }


def table(report: dict[str, Any]) -> str:
    """A line per engine."""
    lines = [f"{'engine':<24}{'tokens/s':>10}{'ours/it':>9}  runs"]
    for name, figures in report["engines"].items():
        lines.append(
            f"{name:<24}{figures['output_tokens_per_s']:>10}{figures['ours_over_it']:>9}  "
            + " ".join(str(rate) for rate in figures["runs"])
        )
    return "\n".join(lines)
