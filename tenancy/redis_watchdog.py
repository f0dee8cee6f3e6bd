"""Runs one redis-server and ends it when the process that asked for it is gone, however that one ended.

    python -I -S redis_watchdog.py OWNER_PID LOCK_FD redis-server CONFIG

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
from typing import Any

_POLL_S = 0.5
_SHUTDOWN_S = 5.0
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    owner, lock, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    stopping = False

    def on_signal(number: int, _: Any) -> None:
        nonlocal stopping
        stopping = stopping or number == signal.SIGTERM

    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, on_signal)

    # The server holds the lock of its data directory for as long as it lives.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=(lock,), preexec_fn=_end_with_parent
    )
    os.close(lock)
    while not stopping and os.getppid() == owner and server.poll() is None:
        if select.select([wake], [], [], _POLL_S)[0]:
            os.read(wake, 64)
    server.terminate()  # nothing happens if it has ended
    try:
        return server.wait(_SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


if __name__ == "__main__":
    sys.exit(main())
