"""The real system: `evenhand serve` in a process of its own, and ways to look at it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
import yaml
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import free_port

REPOSITORY = Path(__file__).parents[2]
METRICS_KEY = "eh_metrics_key_for_tests"
ORIGIN = "https://chat.example"
READY_SECONDS = 90.0
STOP_SECONDS = 10.0
STOP_MARGIN_SECONDS = 10.0
"""Ten seconds are the promise. The rest is for a machine that is busy with something else as well."""

EXTRA_TENANTS: list[dict[str, Any]] = [
    {"id": "metered", "api_keys": ["eh_metered_test"], "limits": {"requests_per_minute": 20}},
    {
        "id": "brisk",
        "api_keys": ["eh_brisk_test"],
        "limits": {"requests_per_minute": 60, "requests_burst": 1},
    },
    {"id": "narrow", "api_keys": ["eh_narrow_test"], "limits": {"max_concurrent_requests": 2}},
    {"id": "marked", "api_keys": ["eh_marked_4f1c9ab277d05e13"]},
    {
        "id": "patient",
        "api_keys": ["eh_patient_test"],
        "unattainable_deadline": "demote",
        "service_tiers": ["default", "flex"],
    },
]
"""Beside the three of config.yaml: tests of limits must not use up each other's."""

ConfigChange = Callable[[dict[str, Any]], None]


class Server:
    """One instance: started, looked at, stopped. All files of it are below one directory."""

    model = "default"
    metrics_key = METRICS_KEY
    origin = ORIGIN
    """The one whose pages may call the API."""

    def __init__(
        self,
        directory: Path,
        command: list[str],
        *,
        change: ConfigChange | None = None,
        ready: Callable[[Server], bool],
        environment: dict[str, str] | None = None,
        linger: float = 0.0,
    ) -> None:
        """`command` gets the config file as its last argument; `change` edits the config first.

        `linger` seconds after its end other processes may still be on their way out.
        """
        self.directory = directory
        self.data_dir = directory / "data"
        self.spans_path = directory / "spans.jsonl"
        self.log_path = directory / "log.txt"
        self.config_path = directory / "config.yaml"
        self.port = free_port()
        self.config = config_for(self.port, self.data_dir, self.spans_path)
        if change is not None:
            change(self.config)
        self.config_path.write_text(yaml.safe_dump(self.config))
        self._is_ready = ready
        self._linger = linger
        self._command = [*command, str(self.config_path)]
        self._mark = uuid.uuid4().hex
        own = {"EVENHAND_E2E": self._mark, "PYTHONUNBUFFERED": "1"}  # what it said last is in its log
        self._environment = {**clean_environment(), **(environment or {}), **own}
        self._seen: set[psutil.Process] = set()
        self._root: Path | None = None
        self._stopped: list[str] | None = None
        self.process: psutil.Popen

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log_path.open("wb") as log:
            self.process = psutil.Popen(
                self._command,
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops the server in order
            )
        try:
            self.wait_until(lambda: self.process.poll() is not None or self._is_ready(self), READY_SECONDS)
            assert self.process.poll() is None, f"the server ended: {self.log()}"
        except BaseException:
            self._kill()
            raise
        self.remember()
        found = re.search(r"/tmp/evenhand-\w+", " ".join(" ".join(_cmdline(p)) for p in self._seen))
        self._root = Path(found[0]) if found else None

    def stop(
        self, how: int = signal.SIGINT, *, send: bool = True, seconds: float = STOP_SECONDS
    ) -> list[str]:
        """Stop in order and return what is wrong: a late end, an exit code, whatever is left behind.

        With `send` False the signal has been sent already. A second call changes nothing.
        """
        if self._stopped is not None:
            return []
        self._stopped = wrong = []
        self.remember()
        if send:
            self.process.send_signal(how)
        try:
            code = self.process.wait(seconds + STOP_MARGIN_SECONDS)
            if code != 0:
                wrong.append(f"exit code {code}: {self.log()[-2000:]}")
        except psutil.TimeoutExpired:
            beside = ", ".join(" ".join(_cmdline(p))[:60] for p in self.survivors())
            late = f"still there after {seconds + STOP_MARGIN_SECONDS:.0f} s, beside {beside}"
            wrong.append(f"{late}: {self.log()[-2000:]}")
        deadline = time.monotonic() + self._linger
        while self.survivors() and time.monotonic() < deadline:
            time.sleep(0.1)
        wrong += [f"left behind: process {p.pid} {' '.join(_cmdline(p))[:150]}" for p in self.survivors()]
        if self._root is not None and self._root.exists():
            wrong.append(f"left behind: {self._root}")
        self._kill()
        return wrong

    def remember(self) -> list[psutil.Process]:
        """All descendants that are there now; they are looked for again after the end."""
        descendants = self.process.children(recursive=True) if self.process.is_running() else []
        self._seen.update(descendants)
        return descendants

    def survivors(self) -> list[psutil.Process]:
        """Processes of this instance that are alive, those that lost their parents included."""
        marked = [p for p in psutil.process_iter() if _environ(p).get("EVENHAND_E2E") == self._mark]
        return [p for p in {*self._seen, *marked} - {self.process} if _alive(p)]

    def find_process(self, title: str) -> psutil.Process:
        """The one descendant whose title begins like this, such as `ray::EngineActor`."""
        found = [p for p in self.remember() if " ".join(_cmdline(p)).startswith(title)]
        assert len(found) == 1, f"{len(found)} processes {title}"
        return found[0]

    def _kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.remember()
            self.process.kill()
            self.process.wait(10)
        for process in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    # Looking at it ------------------------------------------------------------------------------------------

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def ray_logs(self) -> Path:
        assert self._root is not None
        return self._root / "ray" / "session_latest" / "logs"

    def key(self, tenant: str) -> str:
        """The API key of a tenant of the config."""
        tenants = self.config["applications"][0]["deployments"][0]["user_config"]["tenants"]
        return next(str(t["api_keys"][0]) for t in tenants if t["id"] == tenant)

    def headers(self, tenant: str = "alpha", **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key(tenant)}", **more}

    def openai(self, tenant: str = "alpha", **options: Any) -> OpenAI:
        return OpenAI(**self._client_options(tenant, DefaultHttpxClient(trust_env=False), options))

    def async_openai(self, tenant: str = "alpha", **options: Any) -> AsyncOpenAI:
        http_client = DefaultAsyncHttpxClient(trust_env=False)
        return AsyncOpenAI(**self._client_options(tenant, http_client, options))

    def _client_options(self, tenant: str, http_client: Any, options: dict[str, Any]) -> dict[str, Any]:
        defaults = {"api_key": self.key(tenant), "max_retries": 0, "timeout": 60.0}
        return {"base_url": f"{self.base_url}/v1", "http_client": http_client, **defaults, **options}

    def http(self, tenant: str | None = "alpha", **options: Any) -> httpx.Client:
        headers = {} if tenant is None else self.headers(tenant)
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=60.0, trust_env=False, **options)

    def health(self) -> int:
        """The status of /health; 0 when nobody answers."""
        try:
            return httpx.get(f"{self.base_url}/health", timeout=5.0, trust_env=False).status_code
        except httpx.HTTPError:
            return 0

    def metric(self, sample: str, **labels: str) -> float:
        """The sum of a sample over the series that carry these labels. Fails if there is no such sample."""
        values = [s.value for s in self.samples() if s.name == sample and labels.items() <= s.labels.items()]
        assert values or labels, f"no sample {sample}"
        return float(sum(values))

    def samples(self) -> list[Any]:
        """Every sample of /metrics."""
        answer = httpx.get(
            f"{self.base_url}/metrics",
            headers={"Authorization": f"Bearer {METRICS_KEY}"},
            timeout=10.0,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        return [s for family in text_string_to_metric_families(answer.text) for s in family.samples]

    def spans(self) -> list[dict[str, Any]]:
        """Every span written so far."""
        return _json_lines(self.spans_path)

    def access_log(self) -> list[dict[str, Any]]:
        return _json_lines(self.data_dir / "logs" / "access.jsonl")

    def slots(self, tenant: str) -> int:
        """Concurrency slots of a tenant that are taken, as Redis has them."""
        settings = self.redis_settings()
        with redis.Redis(port=int(settings["port"]), password=settings["requirepass"]) as client:
            return int(client.hget(f"eh:v2:{{{tenant}}}:counts", "tenant/max_concurrent_requests") or 0)

    def redis_settings(self) -> dict[str, str]:
        """What the embedded Redis was started with."""
        lines = (self.data_dir / "redis" / "redis.conf").read_text().splitlines()
        return dict(line.split(" ", 1) for line in lines)

    def is_idle(self) -> bool:
        """The engine has nothing to do."""
        return self.metric("num_requests_running") == 0 and self.metric("num_requests_waiting") == 0

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float) -> float:
        """Poll until it holds, and return how long that took. Fails after `seconds`."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < seconds, f"not true after {seconds} s"
            time.sleep(0.05)
        return time.monotonic() - begin


def config_for(port: int, data_dir: Path, spans_path: Path) -> dict[str, Any]:
    """config.yaml as shipped, with a port and files of its own, more tenants, an origin, and telemetry on."""
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "config.yaml").read_text())
    config["http_options"]["port"] = port
    application = config["applications"][0]
    application["args"]["data_dir"] = str(data_dir)
    application["args"]["gateway"]["cors_origins"] = [ORIGIN]
    application["args"]["telemetry"] = {
        "tracing": {"exporter": "file", "path": str(spans_path)},
    }
    # Tests send wrong keys by the hundred, all from one address.
    application["args"]["gateway"]["max_failed_logins_per_minute"] = 10_000
    user_config = application["deployments"][0]["user_config"]
    user_config["metrics_key"] = METRICS_KEY
    user_config["tenants"] += EXTRA_TENANTS
    return config


def evenhand(*arguments: str) -> list[str]:
    """The installed command."""
    return [str(Path(sys.executable).with_name("evenhand")), *arguments]


def clean_environment() -> dict[str, str]:
    """Ours, without what other tests or a user's shell may have set for Ray or for us."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "EVENHAND_"))}


def _says_ready(server: Server) -> bool:
    return re.search(r"^ready: ", server.log(), re.MULTILINE) is not None


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _json_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


MakeServer = Callable[..., Any]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> MakeServer:
    """A context manager per server: ready inside it, stopped after it with nothing left behind."""

    @contextlib.contextmanager
    def start(
        *arguments: str,
        change: ConfigChange | None = None,
        command: list[str] | None = None,
        ready: Callable[[Server], bool] = _says_ready,
        **options: Any,
    ) -> Iterator[Server]:
        command = evenhand("serve", *arguments) if command is None else command
        server = Server(tmp_path_factory.mktemp("server"), command, change=change, ready=ready, **options)
        server.start()
        try:
            yield server
        finally:
            wrong = server.stop()
        assert not wrong, "\n".join(wrong)

    return start


@pytest.fixture(scope="session")
def stub(start_server: MakeServer) -> Iterator[Server]:
    """A server with the stub engine, for all that does not depend on a model. Never harmed by a test."""
    with start_server("--engine", "stub") as server:
        yield server


@pytest.fixture(scope="session")
def real(start_server: MakeServer) -> Iterator[Server]:
    """A server with the model of config.yaml."""
    with start_server() as server:
        yield server


@pytest.fixture
def run_evenhand(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command that is expected to end by itself."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            evenhand(*arguments),
            cwd=tmp_path,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A config to break, with a free port."""
    return config_for(free_port(), tmp_path / "data", tmp_path / "spans.jsonl")
