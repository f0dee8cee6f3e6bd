"""A server of our own for a measurement: started as a user would, on a free port, stopped in order."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.workload import BenchmarkError
from serve_app.ray_environment import is_free

START_SECONDS = 180.0
STOP_SECONDS = 40.0


@dataclass(frozen=True)
class RunningServer:
    """`directory` holds its files: the data directory is `data` in it."""

    port: int
    process: psutil.Process
    directory: Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    """Below the ports of outgoing connections, of which a start makes hundreds, and below those of the server's own."""
    return next(port for port in random.sample(range(10_000, 20_000), 1000) if is_free("127.0.0.1", port))


@contextmanager
def running_server(config: dict[str, Any]) -> Iterator[RunningServer]:
    """Run `evenhand serve` on a config with a port and a data directory of its own.

    Raises BenchmarkError when it does not get ready.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="evenhand-bench-") as name:
        directory = Path(name)
        config["http_options"]["port"] = port
        config["applications"][0]["args"]["data_dir"] = str(directory / "data")
        path, log = directory / "config.yaml", directory / "log.txt"
        path.write_text(yaml.safe_dump(config))
        # Ray takes its settings from the environment: those of another cluster must not reach this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("evenhand")), "serve", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while re.search(r"^ready: ", log.read_text(errors="replace"), re.MULTILINE) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchmarkError(
                        f"the server did not start: {log.read_text(errors='replace')[-2000:]}"
                    )
                time.sleep(0.1)
            yield RunningServer(port, psutil.Process(process.pid), directory)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
