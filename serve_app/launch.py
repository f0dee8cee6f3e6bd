"""The front door: serves one config file on one machine, in a Ray cluster of its own, until a signal."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from serve_app.config_errors import ConfigError
from serve_app.config_file import ServeConfig, load_config, require_sources
from serve_app.exposure import demo_key
from serve_app.haproxy import install_haproxy
from serve_app.ray_environment import claim_ports, is_free, ray_variables, set_defaults
from serve_app.settings import REDIS_URL_VARIABLE

_OBJECT_STORE_BYTES = 128 * 1024 * 1024  # prompts and tokens travel in messages: nothing large is stored
_POLL_SECONDS = 0.1
_STATUS_SECONDS = 1.0
_LAST_SECONDS = 3.0  # for processes to end by themselves once all have been told to

_EXCEPTION_LINE = re.compile(r"(\w+\.)*(?P<what>\w*(Error|Exception|Exit)\b: .+)")
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")

Echo = Callable[[str], None]


class LaunchError(RuntimeError):
    """The instance could not be started. The message is one line for the user."""


@dataclass(frozen=True)
class Overrides:
    """What the command line sets over the config file."""

    host: str | None = None
    port: int | None = None
    engine: str | None = None
    policy: str | None = None


def serve(path: Path, overrides: Overrides, echo: Echo) -> None:
    """Serve the config at `path` until SIGINT or SIGTERM, then let running requests end and stop.

    SIGUSR1 reads the file again and deploys it: what is under `user_config` changes without a restart. A
    second SIGINT or SIGTERM cuts running requests off. Raises ConfigError or LaunchError; no process is left
    behind.
    """
    root = Path(tempfile.mkdtemp(prefix="evenhand-", dir="/tmp"))  # not TMPDIR: sockets need a short path
    keep = False
    try:
        signals = _Signals(root)
        set_defaults(ray_variables(root))  # before the config is checked, which imports Ray
        config = load_config(path).override(**asdict(overrides))
        require_sources(config)
        require_free(config.host, config.port)
        require_writable(config.settings.data_path(config.port))
        ports, claim = claim_ports(exclude=config.port)
        with claim:
            set_defaults(ports)
            install_haproxy(root)
            _Instance(path, overrides, config, root, echo, signals).run()
    except ConfigError:
        raise
    except Exception as error:
        cause = (
            str(error)
            if isinstance(error, LaunchError)
            else f"{type(error).__name__}: {first_cause(str(error))}"
        )
        logs = root / "ray" / "session_latest" / "logs"
        keep = logs.exists()
        raise LaunchError(f"{cause} (logs: {logs.resolve()})" if keep else cause) from error
    finally:
        if not keep:
            _remove(root)


def require_free(host: str, port: int) -> None:
    """Raise LaunchError unless a server could listen there."""
    try:
        free = is_free(host, port)
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    if not free:
        raise LaunchError(f"{host}:{port} is in use; choose another port with --port")


def require_writable(data_dir: Path) -> None:
    """Make the directory. Raise LaunchError unless files can be written there."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except OSError as error:
        raise LaunchError(f"data_dir: cannot write below {data_dir}: {error.strerror or error}") from error


def base_url(config: ServeConfig) -> str:
    """Where this machine reaches the instance."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}{config.route_prefix}"


def ready_message(config: ServeConfig) -> str:
    """`ready`, and a request to paste."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": config.settings.models[0].id, "messages": [question], "temperature": 0})
    key = demo_key(config.user_config.tenants) or "YOUR_KEY"
    return (
        f"ready: {base_url(config)}\n"
        f"curl {base_url(config)}/v1/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def first_cause(message: str) -> str:
    """The line of a message of Ray's, often with a traceback in it, that says what went wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [match for line in lines if (match := _EXCEPTION_LINE.fullmatch(line))]
    if errors:
        return errors[-1]["what"]
    return lines[-1] if lines else "no reason given"


class _Instance:
    """One run of the front door, from the free port to the last process."""

    def __init__(
        self,
        path: Path,
        overrides: Overrides,
        config: ServeConfig,
        root: Path,
        echo: Echo,
        signals: _Signals,
    ) -> None:
        self._path, self._overrides, self._config = path, overrides, config
        self._root, self._echo, self._signals = root, echo, signals
        self._data_dir = config.settings.data_path(config.port)
        self._client: Any = None
        self._ready = False

    def run(self) -> None:
        processes: list[psutil.Process] = []
        with contextlib.ExitStack() as stack:
            stack.callback(_end, processes)
            self._ready = self._start(stack, processes)
            if not self._ready:
                return
            self._echo(ready_message(self._config))
            while not self._signals.stop:
                self._signals.wait()
                if self._signals.take_reload():
                    self._reload()
            self._echo("stopping once running requests have ended; Ctrl-C again cuts them off")
            self._drain()

    def _start(self, stack: contextlib.ExitStack, processes: list[psutil.Process]) -> bool:
        """Start everything, step by step; False when told to stop in between. `stack` undoes what was done."""

        def start_ray() -> None:
            stack.callback(self._stop_ray)
            stack.callback(lambda: processes.extend(psutil.Process().children(recursive=True)))
            self._start_ray()

        steps: tuple[Callable[[], None], ...] = (
            lambda: self._echo(f"starting {', '.join(model.id for model in self._config.settings.models)}"),
            lambda: self._start_redis(stack),
            start_ray,
            self._start_serve,
            lambda: self._deploy(self._config),
            self._wait_until_ready,
        )
        for step in steps:
            if self._signals.stop:
                return False
            step()
        return not self._signals.stop

    def _start_redis(self, stack: contextlib.ExitStack) -> None:
        if self._config.settings.redis_url is None:
            from tenancy.embedded_redis import EmbeddedRedis, RedisServerError

            try:
                redis = stack.enter_context(EmbeddedRedis(self._data_dir / "redis"))
            except RedisServerError as error:
                raise LaunchError(str(error)) from error
            os.environ[REDIS_URL_VARIABLE] = redis.url

    def _start_ray(self) -> None:
        import ray

        # Ray's Python handler of SIGTERM would end this process in the middle of a start.
        ray._private.utils.set_sigterm_handler = _leave_sigterm
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=True,
            _temp_dir=str(self._root / "ray"),
        )
        self._signals.install()

    def _start_serve(self) -> None:
        # As `serve run` does it: the public `serve.run` takes an application, not a config.
        from ray.serve._private.api import serve_start
        from ray.serve.config import gRPCOptions
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(self._config.document)
        self._client = serve_start(
            http_options=schema.http_options.model_dump(),
            grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
            proxy_location=schema.proxy_location,
            controller_options=schema.controller_options,
        )

    def _deploy(self, config: ServeConfig) -> None:
        from ray.serve.schema import ServeDeploySchema

        document = config.override(data_dir=str(self._data_dir)).document
        self._client.deploy_apps(ServeDeploySchema.model_validate(document), _blocking=False)

    def _reload(self) -> None:
        try:
            self._deploy(load_config(self._path).override(**asdict(self._overrides)))
            self._echo("config deployed again")
        except ConfigError as error:
            self._echo(f"config not deployed: {error}")

    def _wait_until_ready(self) -> None:
        """Until our own /health answers 200: HAProxy's port is open, and answers 404, long before."""
        next_status = 0.0
        while not self._signals.stop and not _answers(f"{base_url(self._config)}/health"):
            if time.monotonic() >= next_status:
                self._raise_if_failed()
                next_status = time.monotonic() + _STATUS_SECONDS
            time.sleep(_POLL_SECONDS)

    def _raise_if_failed(self) -> None:
        from ray import serve

        for name, application in serve.status().applications.items():
            if application.status.value in _FAILED:
                parts = [d.message for d in application.deployments.values() if d.status.value in _FAILED]
                cause = first_cause("\n".join(parts) or application.message)
                raise LaunchError(f"{name} could not be started: {cause}")

    def _drain(self) -> None:
        """Serve's own drain: the route goes first, then each replica when its requests have ended."""
        from ray import serve

        self._client.delete_apps(list(serve.status().applications), blocking=False)
        while serve.status().applications:
            time.sleep(_POLL_SECONDS)

    def _stop_ray(self) -> None:
        import ray
        from ray import serve

        # Ray reports the end of actors that it was told to end as failures.
        nowhere = io.StringIO()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            if self._ready:
                serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def _answers(url: str) -> bool:
    try:
        # Straight to it, whatever HTTP_PROXY says.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


class _Signals:
    """What SIGINT, SIGTERM and SIGUSR1 ask for. Nothing is interrupted: who waits asks, and so does each step."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._wake = threading.Event()
        self._reload = False
        self.stop = False
        self.install()

    def install(self) -> None:
        """Also after what puts handlers of its own in their place, as Ray's native code does."""
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_reload)

    def wait(self) -> None:
        """Until a signal comes, or at once if one came since the last call."""
        self._wake.wait()
        self._wake.clear()

    def take_reload(self) -> bool:
        asked, self._reload = self._reload, False
        return asked

    def _on_reload(self, *_: object) -> None:
        self._reload = True
        self._wake.set()

    def _on_stop(self, *_: object) -> None:
        if self.stop:
            _cut_off(self._root)
        self.stop = True
        self._wake.set()


def _remove(root: Path) -> None:
    """The last processes may still write while it is being removed."""
    for _ in range(20):
        shutil.rmtree(root, ignore_errors=True)
        if not root.exists():
            return
        time.sleep(_POLL_SECONDS)


def _leave_sigterm(handler: object) -> None:
    pass


def _cut_off(root: Path) -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(root, ignore_errors=True)
    os._exit(130)


def _end(processes: list[psutil.Process]) -> None:
    """Kill those that are still there after a last wait."""
    _, alive = psutil.wait_procs(processes, timeout=_LAST_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
