"""Runs one redis-server, starts it again when it dies, and ends it when the process that asked for it is gone.

    python -I -S redis_watchdog.py OWNER_PID LOCK_FD redis-server CONFIG

Until SIGUSR1 says that the server has answered once, its end is the end of this process: a server that cannot
start is the owner's business. What happens later is told on stderr.

A process of its own, since PR_SET_PDEATHSIG alone is bound to the thread that forked: it would end Redis
with a worker thread. Here there is one thread, so it is safe to use for the case that this process itself
is killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

_POLL_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LIVED_S = 30.0
"""A server that lived this long did not die of its start."""

_SHUTDOWN_S = 5.0
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _run(command: list[str], lock: int) -> subprocess.Popen[bytes]:
    # The server holds the lock of its data directory for as long as it lives.
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=(lock,), preexec_fn=_end_with_parent
    )


def main() -> int:
    owner, lock, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    stopping = lasting = False

    def on_signal(number: int, _: Any) -> None:
        nonlocal stopping, lasting
        stopping = stopping or number == signal.SIGTERM
        lasting = lasting or number == signal.SIGUSR1

    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, on_signal)

    def wait(seconds: float) -> None:
        if select.select([wake], [], [], seconds)[0]:
            os.read(wake, 64)

    server, pause = _run(command, lock), _FIRST_PAUSE_S
    started = time.monotonic()
    while not stopping and os.getppid() == owner:
        if server.poll() is None:
            wait(_POLL_S)
            continue
        if not lasting:
            break
        lived = time.monotonic() - started
        pause = _FIRST_PAUSE_S if lived >= _LIVED_S else min(2 * pause, _LONGEST_PAUSE_S)
        print(
            f"the embedded Redis ended ({_how(server.returncode)}); started again on the same data and port",
            file=sys.stderr,
            flush=True,
        )
        until = time.monotonic() + pause
        while not stopping and time.monotonic() < until:
            wait(until - time.monotonic())
        if not stopping:
            server, started = _run(command, lock), time.monotonic()
    server.terminate()  # nothing happens if it has ended
    try:
        return server.wait(_SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
