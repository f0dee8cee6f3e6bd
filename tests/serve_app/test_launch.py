"""The front door's parts that need no Ray: ports, environment, HAProxy's script, messages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_app import launch, ray_environment
from serve_app.config_file import ServeConfig, load_config
from serve_app.launch import LaunchError, base_url, first_cause, ready_message, require_free, require_writable
from serve_app.ray_environment import claim_ports, is_free, ray_variables, set_defaults

SHIPPED = Path(__file__).parents[2] / "config.yaml"


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    return load_config(SHIPPED)


@pytest.fixture
def listening() -> Any:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use_is_not_free(listening: int) -> None:
    assert not is_free("127.0.0.1", listening)
    with pytest.raises(
        LaunchError, match=rf"127\.0\.0\.1:{listening} is in use; choose another port with --port"
    ):
        require_free("127.0.0.1", listening)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.99:8000: "):
        require_free("192.0.2.99", 8000)


def test_a_data_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "data")
    assert list((tmp_path / "new" / "data").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"data_dir: cannot write below .*/file/data: Not a directory"):
        require_writable(tmp_path / "file" / "data")


def test_ports_are_distinct_free_and_not_the_http_port() -> None:
    for exclude in (8000, 20_000, 24_321, 29_999):
        variables, claim = claim_ports(exclude)
        claim.close()
        ports = {name: int(value) for name, value in variables.items()}
        ranges = {
            protocol: range(
                ports.pop(f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"),
                ports.pop(f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT") + 1,
            )
            for protocol in ("HTTP", "GRPC")
        }
        everything = [*ports.values(), *ranges["HTTP"], *ranges["GRPC"]]
        assert len(set(everything)) == len(everything)
        assert exclude not in everything
        assert len(ranges["HTTP"]) > 300
        assert len(ranges["GRPC"]) >= 100
        assert all(is_free("127.0.0.1", port) for port in ports.values())


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_environment, "is_free", lambda host, port: 23_000 <= port < 23_500)
    variables, claim = claim_ports(8000)
    assert all(23_000 <= int(port) < 23_500 for port in variables.values())
    with claim, pytest.raises(OSError, match="no free ports"):
        claim_ports(8000)  # it is claimed, though nobody listens yet
    claim_ports(8000)[1].close()
    monkeypatch.setattr(ray_environment, "is_free", lambda host, port: False)
    with pytest.raises(OSError, match="no free ports"):
        claim_ports(8000)


def test_every_path_is_below_the_instance(tmp_path: Path) -> None:
    paths = [value for value in ray_variables(tmp_path).values() if value.startswith("/")]
    assert len(paths) >= 5
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)


def test_sockets_stay_below_the_limit_of_their_paths() -> None:
    root = Path("/tmp/evenhand-12345678")
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        directory, _, file = ray_variables(root)[name].rpartition("/")
        # Ray puts a node id of 56 digits in between, HAProxy its pid behind.
        assert len(f"{directory}/{'0' * 56}/{file}.4194304.tmp") < 107


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"EVENHAND_TEST_A": "mine"})
    set_defaults({"EVENHAND_TEST_A": "yours", "EVENHAND_TEST_B": "yours"})
    assert os.environ == {"EVENHAND_TEST_A": "mine", "EVENHAND_TEST_B": "yours"}


def test_replicas_grpc_port_goes_to_loopback() -> None:
    code = (
        "import asyncio, grpc.aio, psutil, serve_app\n"
        "async def main():\n"
        "    server = grpc.aio.server()\n"
        "    port = server.add_insecure_port('[::]:0')\n"
        "    await server.start()\n"
        "    found = [c.laddr for c in psutil.Process().net_connections('inet') if c.status == 'LISTEN']\n"
        "    assert [a.port for a in found] == [port], found\n"
        "    assert found[0].ip in ('127.0.0.1', '::ffff:127.0.0.1'), found\n"
        "    await server.stop(None)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "EVENHAND_LOOPBACK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_ready_message_is_a_line_to_paste(config: ServeConfig) -> None:
    ready, curl = ready_message(config).splitlines()
    assert ready == "ready: http://127.0.0.1:8000"
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {curl}"], capture_output=True, text=True, timeout=30)
    words = done.stdout.splitlines()
    assert words[:4] == [
        "curl",
        "http://127.0.0.1:8000/v1/chat/completions",
        "-H",
        "Authorization: Bearer eh_alpha_demo",
    ]
    assert '"model": "smollm2-135m-instruct"' in words[-1]


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", "localhost"), ("::1", "[::1]"), ("127.0.0.1", "127.0.0.1")]
)
def test_base_url(config: ServeConfig, host: str, expected: str) -> None:
    assert base_url(config.override(host=host, port=9001)) == f"http://{expected}:9001"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "The deployment failed to start 3 times in a row. See controller logs for details. Error:\n"
            "ray::ServeReplica:evenhand:Gateway.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)\n"
            '  File "engine.py", line 3, in __init__\n'
            "    raise LoadError(...)\n"
            "engine_actor.loading.LoadError: blk.3.attn_q.weight is missing\n",
            "LoadError: blk.3.attn_q.weight is missing",
        ),
        ("Deployments could not be scheduled.", "Deployments could not be scheduled."),
        ("", "no reason given"),
    ],
)
def test_first_cause(message: str, cause: str) -> None:
    assert first_cause(message) == cause


def test_processes_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_LAST_SECONDS", 0.2)
    stubborn = subprocess.Popen(["sleep", "600"])
    launch._end([psutil.Process(stubborn.pid)])
    assert stubborn.wait(10) != 0


def test_a_busy_port_stops_the_start_before_anything_is_made(
    listening: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []

    def make(**_: Any) -> str:
        root = tmp_path / "root"
        root.mkdir()
        made.append(str(root))
        return str(root)

    monkeypatch.setattr(launch.tempfile, "mkdtemp", make)
    monkeypatch.setattr(launch, "set_defaults", lambda variables: None)
    monkeypatch.setattr(launch, "require_sources", lambda config: None)
    monkeypatch.setattr(launch.signal, "signal", lambda number, handler: None)
    with pytest.raises(LaunchError, match="is in use"):
        launch.serve(SHIPPED, launch.Overrides(port=listening), lambda text: None)
    assert made
    assert not Path(made[0]).exists()


def test_signals_are_remembered_until_asked_for(tmp_path: Path) -> None:
    """Whatever code runs when they come, nothing is thrown into it."""
    code = (
        "import os, signal, sys; from pathlib import Path; from serve_app.launch import _Signals\n"
        f"signals = _Signals(Path({str(tmp_path / 'root')!r}))\n"
        "os.kill(os.getpid(), signal.SIGUSR1); signals.wait()\n"
        "assert signals.take_reload() and not signals.take_reload() and not signals.stop\n"
        "os.kill(os.getpid(), signal.SIGTERM); signals.wait()\n"
        "assert signals.stop and not signals.take_reload()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "raise SystemExit('the second one did not cut off')\n"
    )
    (tmp_path / "root").mkdir()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert not (tmp_path / "root").exists()


def test_rays_handler_of_sigterm_can_be_left_out() -> None:
    """`ray.init` asks for it by this name, which the front door replaces."""
    import ray._private.utils
    import ray._private.worker

    assert callable(ray._private.utils.set_sigterm_handler)
    assert "ray._private.utils.set_sigterm_handler(" in Path(ray._private.worker.__file__).read_text()
