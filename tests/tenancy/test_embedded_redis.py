"""The server of our own: found, started, stopped, and gone with whoever started it."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis as redis_py

from tenancy import embedded_redis
from tenancy.embedded_redis import EmbeddedRedis, RedisServerError, find_server

ROOT = Path(embedded_redis.__file__).parents[1]


def client(url: str) -> redis_py.Redis:
    return redis_py.Redis.from_url(url, socket_timeout=5)


def server_pid(url: str) -> int:
    return int(client(url).info("server")["process_id"])


def gone(pid: int, within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def test_it_is_private_durable_and_stops(tmp_path: Path) -> None:
    folder = tmp_path / 'with "quotes" and ü'
    with EmbeddedRedis(folder) as server:
        url, pid = server.url, server_pid(server.url)
        config = client(url).config_get("*")
        wanted = {
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "dir": str(folder),
        }
        assert {name: config[name] for name in wanted} == wanted
        secret = config["requirepass"]
        assert len(secret) == 64 and secret not in repr(server)
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
        with pytest.raises(redis_py.AuthenticationError):
            client(url.replace(secret, "wrong")).ping()
    assert gone(pid)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("redis.conf", "redis.password", "redis.lock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    with pytest.raises(RuntimeError, match="has not been started"):
        server.url  # noqa: B018
    server.stop()


def test_the_append_only_file_survives_a_stop_and_a_crash(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        client(server.url).set("budget", "7")
    with EmbeddedRedis(tmp_path) as server:
        connection = client(server.url)
        assert connection.incr("budget") == 8
        os.kill(server_pid(server.url), signal.SIGKILL)
    with EmbeddedRedis(tmp_path) as server:
        assert client(server.url).get("budget") == b"8"


def test_two_instances_live_side_by_side(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "a") as a, EmbeddedRedis(tmp_path / "b") as b:
        client(a.url).set("who", "a")
        assert a.url != b.url and client(b.url).get("who") is None


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as first:
        with pytest.raises(RedisServerError, match="in use by another running instance"):
            EmbeddedRedis(tmp_path).start()
        assert client(first.url).ping()
        with pytest.raises(RuntimeError, match="started already"):
            first.start()


OWNER = """
import sys, threading, time
from tenancy.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(sys.argv[1])
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
print(server.url, server._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["owner", "watchdog"])
def test_it_outlives_its_thread_but_neither_its_process_nor_its_watchdog(tmp_path: Path, victim: str) -> None:
    if victim == "watchdog" and sys.platform != "linux":
        pytest.skip("only Linux can tie a process to its parent")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        url, watchdog = owner.stdout.readline().split()
        pid = server_pid(url)  # the thread that started it has ended
        time.sleep(0.7)  # more than one round of the watchdog
        assert client(url).ping()
        os.kill(owner.pid if victim == "owner" else int(watchdog), signal.SIGKILL)
        assert gone(pid)
        if victim == "owner":
            assert gone(int(watchdog))
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    with EmbeddedRedis(tmp_path) as server:  # and the directory is free again
        assert client(server.url).ping()


def test_a_server_that_dies_is_started_again_on_the_same_data_and_port(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedRedis(tmp_path) as server:
        url, pids = server.url, []
        for number in range(1, 3):
            assert client(url).incr("budget") == number
            pids.append(server_pid(url))
            time.sleep(1.1)  # the append-only file is on disk every second
            os.kill(pids[-1], signal.SIGKILL)
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline:
                try:
                    if server_pid(url) != pids[-1] and client(url).get("budget") == str(number).encode():
                        break
                except redis_py.RedisError:
                    time.sleep(0.05)
            else:
                pytest.fail("it was not started again")
        pids.append(server_pid(url))
        assert len(set(pids)) == 3 and server.running
        with pytest.raises(RedisServerError, match="in use by another running instance"):
            EmbeddedRedis(tmp_path).start()
    assert all(gone(pid) for pid in pids)
    assert capfd.readouterr().err.count("the embedded Redis ended (signal 9); started again") == 2


def test_stop_ends_a_frozen_server(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    pid = server_pid(server.url)
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert gone(pid)


def test_a_lost_port_race_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis(tmp_path / "a") as first:
        taken, free = int(first.url.rsplit(":", 1)[1].split("/")[0]), embedded_redis._free_port()
        ports = iter([taken, free])
        monkeypatch.setattr(embedded_redis, "_free_port", lambda: next(ports))
        with EmbeddedRedis(tmp_path / "b") as second:
            assert client(second.url).ping() and f":{free}/" in second.url


def test_a_server_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("not a directory")
    with pytest.raises(RedisServerError, match=r"ended at its start: .*director"):
        EmbeddedRedis(tmp_path).start()
    (tmp_path / "appendonlydir").unlink()
    with EmbeddedRedis(tmp_path) as server:  # and keeps no lock
        assert client(server.url).ping()


def test_a_named_server_must_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_REDIS_SERVER", str(tmp_path / "none"))
    with pytest.raises(RedisServerError, match=r"EVENHAND_REDIS_SERVER=.*none: not found"):
        find_server(tmp_path)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'libgomp.so.1: cannot open shared object file' >&2\nexit 127\n")
    broken.chmod(0o700)
    monkeypatch.setenv("EVENHAND_REDIS_SERVER", str(broken))
    with pytest.raises(RedisServerError, match=r"broken: libgomp\.so\.1: cannot open"):
        find_server(tmp_path)


def test_a_server_without_its_execute_permission_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = find_server(tmp_path)
    plain = tmp_path / "site-packages-redis"
    shutil.copyfile(original, plain)
    plain.chmod(0o444)
    monkeypatch.setenv("EVENHAND_REDIS_SERVER", str(plain))
    data = tmp_path / "data"
    data.mkdir()
    assert find_server(data) == data / "redis-server"
    assert stat.S_IMODE(plain.stat().st_mode) == 0o444


def test_path_comes_before_the_wheel_and_a_broken_one_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVENHAND_REDIS_SERVER", raising=False)
    found = find_server(tmp_path)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    (folder / "redis-server").write_text("#!/bin/sh\nexit 1\n")
    (folder / "redis-server").chmod(0o700)
    (folder / "valkey-server").symlink_to(found)
    assert find_server(tmp_path) == folder / "valkey-server"
