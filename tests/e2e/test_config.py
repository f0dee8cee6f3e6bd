"""A config that cannot be served ends the command at once, with one line that says what to change."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.e2e

Run = Callable[..., "subprocess.CompletedProcess[str]"]
MODEL = ("applications", 0, "args", "models", 0)


def put(config: Any, path: tuple[str | int, ...], value: Any) -> None:
    for part in path[:-1]:
        config = config[part]
    config[path[-1]] = value


def write(config: dict[str, Any], directory: Path) -> str:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def the_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line, where there was nothing else but the news that a start was tried."""
    assert done.returncode == 1, done
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("starting ")]
    assert len(lines) == 1, done
    assert lines[0].startswith("error: ")
    return lines[0]


def test_the_shipped_config_is_fine(run_evenhand: Run) -> None:
    done = run_evenhand("config", "check", str(Path(__file__).parents[2] / "config.yaml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("config.yaml: ok\n")


@pytest.mark.parametrize("command", [("serve",), ("config", "check")])
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ((*MODEL, "quantisation"), "none", ["models[0].quantisation", "unknown key", "quantization"]),
        ((*MODEL, "dtype"), "float8", ["models[0].dtype", "'float8'", "bfloat16"]),
    ],
    ids=["unknown key", "bad value"],
)
def test_mistakes(
    run_evenhand: Run,
    config: dict[str, Any],
    tmp_path: Path,
    command: tuple[str, ...],
    path: tuple[str | int, ...],
    value: Any,
    said: list[str],
) -> None:
    put(config, path, value)
    line = the_error(run_evenhand(*command, write(config, tmp_path)))
    assert all(part in line for part in said), line


def test_demo_keys_stay_on_this_machine(run_evenhand: Run, config: dict[str, Any], tmp_path: Path) -> None:
    line = the_error(run_evenhand("serve", write(config, tmp_path), "--host", "0.0.0.0"))
    assert "http_options.host" in line and "'0.0.0.0'" in line and "demo key" in line


def test_a_port_in_use(run_evenhand: Run, config: dict[str, Any], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", config["http_options"]["port"]))
        taken.listen()
        line = the_error(run_evenhand("serve", write(config, tmp_path)))
    assert f"127.0.0.1:{config['http_options']['port']} is in use" in line


def test_no_such_file(run_evenhand: Run) -> None:
    assert "nowhere.yaml: no such file" in the_error(run_evenhand("serve", "nowhere.yaml"))


def test_a_model_that_cannot_be_loaded(run_evenhand: Run, config: dict[str, Any], tmp_path: Path) -> None:
    """Known only once an engine tries: the last line says it, and names the logs."""
    broken = tmp_path / "broken-model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    put(config, (*MODEL, "source"), str(broken))
    done = run_evenhand("serve", write(config, tmp_path))
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ") and "broken-model" in line
    logs = Path(line.rpartition("(logs: ")[2].rstrip(")"))
    assert logs.is_dir()
    shutil.rmtree(logs.parents[2])


@pytest.mark.parametrize("command", [("serve",), ("config", "check")])
@pytest.mark.parametrize("source", ["package:no_such_package", "/no/such/model", "./missing.gguf"])
def test_a_model_that_is_not_there(
    run_evenhand: Run, config: dict[str, Any], tmp_path: Path, command: tuple[str, ...], source: str
) -> None:
    put(config, (*MODEL, "source"), source)
    line = the_error(run_evenhand(*command, write(config, tmp_path)))
    assert "models[0].source" in line
