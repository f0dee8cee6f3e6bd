"""The comparison: every driver is started once, then all run the same requests in turns, one at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.report import Turn, engine_figures, machine
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


# Prime, and far from half a vocabulary, by which the warm-up is shifted.
_SHIFT = 997


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
    peers: Sequence[Peer],
    requests: Sequence[BenchmarkRequest],
    vocab_size: int,
    repeat: int,
    log: Path,
    *,
    sequential: bool = False,
    fresh_prompts: bool = False,
) -> dict[str, Any]:
    """Run every peer `repeat` times, in turns, after one warm-up each on other prompts. The first peer is ours.

    All requests are handed over at once, or with `sequential` each when the one before it has ended.
    `fresh_prompts` replaces every token in every round, alike for all peers, so that no cache knows the prompts from
    the round before. Figures are medians over the rounds, and ours over the peer's. Raises BenchmarkError when a
    driver fails or generates another number of tokens than asked for.
    """
    drivers: list[Driver] = []
    turns: dict[str, list[Turn]] = {peer.name: [] for peer in peers}
    details: dict[str, str] = {}
    warm_up = other_prompts(list(requests), vocab_size)
    # Stopped drivers would outlast the comparison.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with log.open("ab") as output:
        try:
            for peer in peers:
                driver = Driver(peer, output)
                drivers.append(driver)
                details[peer.name] = driver.wait_ready()
                driver.run(warm_up)
                driver.signal(signal.SIGSTOP)
            for number in range(repeat):
                prompts = shifted(requests, number + 1, vocab_size) if fresh_prompts else requests
                # Each round begins with another one: what the machine does meanwhile hits all alike.
                for driver in [*drivers[number % len(drivers) :], *drivers[: number % len(drivers)]]:
                    driver.signal(signal.SIGCONT)
                    turn = _turn(driver, prompts, sequential)
                    driver.signal(signal.SIGSTOP)
                    turns[driver.peer.name].append(turn)
                    print(f"{driver.peer.name}: {turn.rate:.1f} tokens/s", file=sys.stderr)
                    time.sleep(0.5)
        finally:
            for driver in drivers:
                driver.stop()
            signal.signal(signal.SIGTERM, before)
    return {
        "machine": machine(),
        "requests": len(requests),
        "input_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": sum(request.max_tokens for request in requests),
        "repeat": repeat,
        "engines": engine_figures(turns, details, sequential),
    }


def shifted(requests: Sequence[BenchmarkRequest], number: int, vocab_size: int) -> list[BenchmarkRequest]:
    """Prompts of the same shape, every token another one for every `number`."""
    shift = number * _SHIFT
    return [
        replace(r, prompt_token_ids=[(token + shift) % vocab_size for token in r.prompt_token_ids])
        for r in requests
    ]


def _turn(driver: Driver, requests: Sequence[BenchmarkRequest], sequential: bool) -> Turn:
    parts = [[request] for request in requests] if sequential else [requests]
    answers = [driver.run(part) for part in parts]
    expected = sum(request.max_tokens for request in requests)
    made = sum(sum(answer["output_tokens"]) for answer in answers)
    if made != expected:
        raise BenchmarkError(f"{driver.peer.name} made {made} tokens, not {expected}")
    decode = None if sequential else answers[0]["decode_tokens_per_s"]
    return Turn(expected, [answer["seconds"] for answer in answers], decode)
