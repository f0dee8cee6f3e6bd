"""Strangers at the door (cases of group F): what is open, what an error tells, what a hostile request costs."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

pytestmark = pytest.mark.e2e

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def canary(stub: Any) -> Iterator[None]:
    yield
    with stub.http("beta") as client:
        answer = client.post(TEXT, json={"model": "default", "prompt": "canary", "max_tokens": 5})
    assert answer.status_code == 200
    assert stub.health() == 200


def listening(server: Any) -> list[Any]:
    """(process, address) of every port that the instance listens on, and of every socket that takes datagrams."""
    found = []
    for process in [server.process, *server.remember()]:
        try:
            connections = process.net_connections("inet")
        except psutil.Error:
            continue
        found += [
            (process, c.laddr)
            for c in connections
            if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM
        ]
    return found


ROUTES = [
    *("/docs", "/redoc", "/openapi.json", "/metrics", "/tokenize", "/detokenize", "/invocations", "/debug"),
    *("/-/routes", "/-/healthz", "/-/ROUTES", "/%2d/routes", "/-%2froutes", "//-/routes", "/./-/routes"),
    *("/v1/models", "/v1/models/", "//v1/models", "/V1/MODELS", "/v1%2fmodels", "/v1/models/default"),
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/files", "/v1/usage", "/admin/v1"),
    *("/stats", "/api/jobs", "/api/serve/applications/", "/server_info", "/reset_prefix_cache", "/slots"),
]


def test_F02_without_a_key_nothing_is_told(stub: Any) -> None:
    with socket.create_connection(("127.0.0.1", stub.port)) as connection:
        reader = connection.makefile("rb")
        for path in ROUTES:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"):
                request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
                try:
                    connection.sendall(request.encode())
                    status = int(reader.readline().split()[1])
                except (OSError, IndexError):  # HAProxy closes after an answer of its own
                    connection = socket.create_connection(("127.0.0.1", stub.port))
                    reader = connection.makefile("rb")
                    connection.sendall(request.encode())
                    status = int(reader.readline().split()[1])
                assert status in (400, 401, 404, 405), (method, path, status)
                length = 0
                while (line := reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                if method != "HEAD":
                    reader.read(length)


def test_F02_a_request_to_upgrade_is_a_request_like_any_other(stub: Any) -> None:
    """No other protocol is spoken, and asking for one is no fault of the server."""
    upgrade = "Connection: Upgrade\r\nUpgrade: {}\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    websocket = upgrade.format("websocket") + "Sec-WebSocket-Version: 13\r\n" + key
    for line, headers, status in (
        ("GET /", websocket, b"404"),
        ("GET /v1/completions", websocket, b"405"),
        ("GET /v1/realtime", websocket, b"404"),
        ("GET /v1/models", upgrade.format("h2c") + "HTTP2-Settings: AAMAAABk\r\n", b"401"),
        ("OPTIONS *", "", b"400"),
    ):
        answer = raw(stub, f"{line} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        assert answer.split()[1] == status, (line, answer)
        assert b'"error"' in answer or b"content-length" in answer
    assert raw(stub, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)).split()[1] == b"400"


NAME = b"X-Request-Id: "


@pytest.mark.parametrize("name", [b"\xe9", b"\xff\xfe", b"", b"a" * 129, b"a\tb", b"a\r\n" + NAME + b"b"])
def test_F15_odd_names_of_requests_get_another(stub: Any, name: bytes) -> None:
    body = b'{"model": "default", "prompt": "x", "max_tokens": 1}'
    key = f"Authorization: Bearer {stub.key('alpha')}\r\n".encode()
    answer = raw(stub, HEAD + key + NAME + name + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.split()[1] == b"200"
    names = [line for line in answer.split(b"\r\n") if line.lower().startswith(NAME.lower())]
    assert len(names) == 1
    given = names[0][len(NAME) :].decode("ascii")
    assert 16 <= len(given) <= 64
    stub.wait_until(lambda: any(line["request"] == given for line in stub.access_log()), 5)


@pytest.mark.parametrize(
    "header",
    [
        b"serve_multiplexed_model_id: \xe9",
        b"Serve-Multiplexed-Model-Id: x",
        b"x-session-id: \xe9",
        b"x-request-timeout-seconds: 0.0001",
        b"x-request-timeout-seconds: \xe9",
        b"x-request-disconnect-disabled: \xe9",
        b"x-serve-router-policy: \xe9",
        b"traceparent: \xe9",
        b"tracestate: \xe9",
        b"X-Anything: \xe9\x80",
    ],
)
def test_F15_no_header_brings_an_error_of_the_server(stub: Any, header: bytes) -> None:
    body = b'{"model": "default", "prompt": "x", "max_tokens": 1}'
    key = f"Authorization: Bearer {stub.key('alpha')}\r\n".encode()
    answer = raw(stub, HEAD + key + header + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.split()[1] == b"200", answer


@pytest.mark.parametrize(
    "trailer",
    [
        "Authorization: Bearer x",
        "X-Request-Id: é",
        "X-Forwarded-For: 203.0.113.7",
        "serve_multiplexed_model_id: é",
    ],
)
def test_F07_what_follows_the_body_is_no_header(stub: Any, trailer: str) -> None:
    """A proxy in front neither sees nor removes it: who calls, and with which key, is said before the body alone."""
    body = b'{"model": "default", "prompt": "x", "max_tokens": 1}'
    chunks = b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(body), body, trailer.encode("latin-1"))
    key = f"Authorization: Bearer {stub.key('alpha')}\r\n".encode()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    assert raw(stub, HEAD + key + chunked + chunks).split()[1] == b"200"
    late = b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, key)
    assert raw(stub, HEAD + chunked + late).split()[1] == b"401"


SMUGGLED = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        b"Content-Length: 5\r\nTransfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
        b"Content-Length: 5\r\nTransfer-Encoding : chunked\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding:\x0bchunked\r\n\r\n" + SMUGGLED,
        b"Content-Length: +2\r\n\r\n{}",
        b"Content-Length: 2, 3\r\n\r\n{}GET / HTTP/1.1\r\n\r\n",
        b"Content-Length: 0x2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc",
    ],
)
def test_F02_one_request_is_never_read_as_two(stub: Any, framing: bytes) -> None:
    key = f"Authorization: Bearer {stub.key('alpha')}\r\n".encode()
    with socket.create_connection(("127.0.0.1", stub.port), timeout=10) as connection:
        connection.sendall(HEAD + key + framing)
        received = b""
        with contextlib.suppress(OSError):
            while more := connection.recv(65536):
                received += more
    assert received.count(b"HTTP/1.1 ") == 1, received
    assert received.split()[1] in (b"400", b"422"), received


def test_F02_a_tenants_key_opens_no_metrics(stub: Any) -> None:
    with stub.http() as client:
        assert client.get("/metrics").status_code == 401
        for path in ("/health", "/live", "/ready", "/version"):
            assert len(httpx.get(stub.base_url + path, trust_env=False).content) < 40


def test_F04_errors_repeat_no_key(stub: Any) -> None:
    keys = ["eh_alpha_demX", "eh_alpha_dem", "sk-proj-" + "a" * 40, "x" * 8000, "eh_alpha_demo extra", "ключ"]
    answers = set()
    with stub.http(None) as client:
        for key in keys:
            answer = client.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
            assert answer.status_code == 401
            answers.add(answer.content)
            shown = answer.text + str(answer.headers)
            assert key[:12] not in shown and "hash" not in shown.lower()
            assert "server" not in answer.headers
    assert len(answers) == 1


TEMPLATE = "{% for i in range(10**9) %}{{ 'x' * 10**9 }}{% endfor %}"


def test_F09_templates_of_a_request_are_never_rendered(stub: Any) -> None:
    for field, value in (
        ("chat_template", TEMPLATE),
        ("chat_template_kwargs", {"chat_template": TEMPLATE}),
        ("chat_template_args", {"a": {"chat_template": TEMPLATE}}),
        ("documents", [{"text": TEMPLATE}]),
    ):
        with stub.http() as client:
            answer = client.post(CHAT, json={"model": "default", "messages": HELLO, field: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    with stub.http() as client:
        request = {"model": "default", "messages": [{"role": "user", "content": TEMPLATE}], "max_tokens": 1}
        answer = client.post(CHAT, json=request)
    assert answer.json()["usage"]["prompt_tokens"] < 200, "it is text like any other"


def test_F10_F11_every_port_is_on_loopback(stub: Any) -> None:
    ports = listening(stub)
    assert len(ports) > 5
    outside = [
        (process.name(), address)
        for process, address in ports
        if address.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]
    assert outside == []


class Trap:
    """Unpickled by anybody, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_F10_junk_and_pickles_do_nothing_on_any_port(stub: Any, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for payload in (pickle.dumps(Trap(trap)), b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(512)):
        for _, address in listening(stub):
            try:
                with socket.create_connection((address.ip, address.port), timeout=2) as connection:
                    connection.sendall(payload)
                    connection.settimeout(0.02)
                    connection.recv(64)
            except OSError:
                continue
    assert not trap.exists()


def test_F13_names_of_models_are_names(stub: Any) -> None:
    names = [
        "../../etc/passwd",
        "/etc/hosts",
        "a/../b",
        "%2e%2e/x",
        "x" * 10_000,
        "🙂",
        "a\r\nX-Evil: 1",
        "/tmp",
    ]
    with stub.http() as client:
        for name in names:
            answer = client.post(TEXT, json={"model": name, "prompt": "x"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert len(error["message"]) < 200 and "\n" not in error["message"]
            assert "x-evil" not in answer.headers
        for path in ("..%2f..%2fetc%2fpasswd", "default/../../x", "%00", "a%0d%0ab"):
            assert client.get(f"/v1/models/{path}").status_code == 404
        nul = client.post(TEXT, content=b'{"model": "a\\u0000b", "prompt": "x"}', headers=JSON)
    assert nul.status_code == 400
    lines = [line for line in stub.access_log() if line["model"] and "passwd" in line["model"]]
    assert all(len(line["model"]) < 200 for line in lines)


@pytest.fixture
def listener() -> Iterator[Any]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.3)
        yield server


def test_F14_no_address_of_a_request_is_called(stub: Any, listener: Any) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "file", "file": {"file_data": url}},
    ]
    with stub.http() as client:
        for part in parts:
            messages = [{"role": "user", "content": [part]}]
            answer = client.post(CHAT, json={"model": "default", "messages": messages})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages[0].content[0]"
        fields = dict.fromkeys(("api_base", "base_url", "callback_url", "webhook", "proxy"), url)
        request = {"model": "default", "messages": HELLO, "max_tokens": 1, **fields}
        assert client.post(CHAT, json=request).status_code == 200  # unknown fields, which nobody reads
    with pytest.raises(TimeoutError):
        listener.accept()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def raw(server: Any, data: bytes, seconds: float = 20) -> bytes:
    """What comes back for these bytes, up to the end of the connection or of the headers."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        received = b""
        with contextlib.suppress(OSError):  # refused before the end: the answer may be there
            connection.sendall(data)
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in received and (more := connection.recv(65536)):
                received += more
        return received


def test_F15_too_much_is_refused_early(stub: Any) -> None:
    key = f"Authorization: Bearer {stub.key('alpha')}\r\n".encode()
    cases = [
        (HEAD + key + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
        (HEAD + key + b"".join(b"X-%d: a\r\n" % n for n in range(150)) + b"\r\n", b"431"),
        (HEAD + key + b"Content-Length: 2000000000\r\n\r\n{", b"413"),
        (HEAD + key + b"Content-Length: -5\r\n\r\n{}", b"400"),
        (HEAD + key + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"400"),
        (HEAD + key + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", b"400"),
        (HEAD + key + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", b"415"),
        (HEAD + b"Content-Length: 2000000000\r\n\r\n{", b"401"),
    ]
    for data, status in cases:
        assert raw(stub, data).split()[1] == status, data[-80:]
    memory = sum(p.memory_info().rss for p in stub.remember() if "HAPROXY" in p.name().upper())
    for size in (1 << 20, 100 << 20):
        endless = HEAD + b"X: " + b"a" * size
        assert raw(stub, endless, 5)[:12] in (b"HTTP/1.1 400", b"")
    grown = sum(p.memory_info().rss for p in stub.remember() if "HAPROXY" in p.name().upper()) - memory
    assert grown < 32 << 20


@pytest.mark.parametrize(
    ("line", "key", "status"),
    [
        ("POST /v1/completions", False, 401),
        ("POST /v1/completions", True, 413),
        ("POST /tokenize", False, 401),
        ("POST /metrics", False, 405),
        ("POST /nowhere", False, 404),
        ("GET /health", False, 200),
        ("GET /v1/models", True, 200),
    ],
)
def test_F15_nobody_goes_on_sending_after_the_answer(stub: Any, line: str, key: bool, status: int) -> None:
    """A body without end, of no declared length: the connection ends with the answer."""
    credential = f"Authorization: Bearer {stub.key('alpha')}\r\n" if key else ""
    head = f"{line} HTTP/1.1\r\nHost: x\r\n{credential}Transfer-Encoding: chunked\r\n\r\n".encode()
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", stub.port), timeout=20) as connection:
        connection.sendall(head)
        with pytest.raises(OSError):
            while sent < 200 << 20:
                connection.sendall(chunk)
                sent += len(chunk)
        received = b""
        with contextlib.suppress(OSError):
            received = connection.recv(65536)
    assert sent < 64 << 20
    assert received == b"" or received.split()[1] == b"%d" % status  # a reset may come before it is read


@pytest.mark.slow
def test_F15_slow_requests_time_out(stub: Any) -> None:
    """Headers within 15 s, the body within 30 s more."""
    key = f"Authorization: Bearer {stub.key('alpha')}\r\n".encode()
    answers: dict[str, bytes] = {}

    def trickle(name: str, start: bytes) -> None:
        with socket.create_connection(("127.0.0.1", stub.port), timeout=60) as connection:
            connection.sendall(start)
            begin = time.monotonic()
            connection.settimeout(1.0)
            while time.monotonic() - begin < 50:
                try:
                    connection.sendall(b"a")
                    answers[name] = connection.recv(65536)
                    return
                except TimeoutError:
                    continue
                except OSError:
                    return

    threads = [
        threading.Thread(target=trickle, args=("headers", HEAD + key + b"X-Slow: ")),
        threading.Thread(target=trickle, args=("body", HEAD + key + b"Content-Length: 1000\r\n\r\n")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("headers", "body"):
        assert answers[name].split()[1] == b"408", answers
    assert (
        b"request_timeout" in answers["body"]
    )  # before the headers are there, HAProxy has no words but its own


@pytest.mark.parametrize("place", ["unknown", "messages", "tools", "response_format", "metadata"])
def test_F16_deep_and_odd_json_is_refused_quickly(stub: Any, place: str) -> None:
    with stub.http() as client:
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            for depth in (100, 10_000, 100_000):
                nested = opening * depth + "1" + closing * depth
                body = f'{{"model": "default", "messages": [], "{place}": {nested}}}'
                body = body.replace('"messages": [], ', "") if place == "messages" else body
                answer = client.post(CHAT, content=body.encode(), headers=JSON)
                assert answer.status_code == 400, (depth, answer.text)
                assert answer.json()["error"]["code"] == "invalid_request"


def test_F16_duplicates_surrogates_and_many_keys(stub: Any) -> None:
    start = b'{"model": "default", "prompt": "x", '
    bodies = [
        start + b'"prompt": "y"}',
        start + b'"x": {"a": 1, "a": 2}}',
        start + b'"x": "\\ud800"}',
        start + b'"x": "\\u0000"}',
        b"\xef\xbb\xbf" + start + b'"x": 1}',
        start + b",".join(b'"k%d": 1' % n for n in range(100_000)) + b"}",
        start + b'"x": "\xff"}',
        start + b'"x": \x00}',
    ]
    with stub.http() as client:
        for body in bodies:
            answer = client.post(TEXT, content=body, headers=JSON)
            assert answer.status_code == 400, body[:80]
            assert len(answer.text) < 400


def test_F17_control_tokens_in_content_are_text(stub: Any) -> None:
    def count(**message: Any) -> int:
        with stub.http() as client:
            request = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", **message}]}
            return int(client.post(CHAT, json=request).json()["usage"]["prompt_tokens"])

    plain = count(content="")
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert count(content=token) - plain == len(token), "each character is a token"
        assert count(content=f"{token[:3]} {token[3:]}") - plain == len(token) + 1
        halves = [{"type": "text", "text": token[:4]}, {"type": "text", "text": token[4:]}]
        assert count(content=halves) - plain == len(token)
        assert count(content="", name=token) == plain


def test_F19_a_revoked_key_is_refused_within_seconds(stub: Any) -> None:
    """The stream that runs goes on; a new key works within the same bound."""
    config = yaml.safe_load(stub.config_path.read_text())
    tenants = config["applications"][0]["deployments"][0]["user_config"]["tenants"]

    def reload(*more: dict[str, Any]) -> None:
        user_config = config["applications"][0]["deployments"][0]["user_config"]
        user_config["tenants"] = [*tenants, *more]
        stub.config_path.write_text(yaml.safe_dump(config))
        stub.process.send_signal(signal.SIGUSR1)

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{stub.base_url}/v1/models", headers=headers, trust_env=False).status_code

    key = "eh_passing_4f1c9ab277d0"
    assert status(key) == 401
    reload({"id": "passing", "api_keys": [key]})
    stub.wait_until(lambda: status(key) == 200, 10)
    with httpx.stream(
        "POST",
        stub.base_url + TEXT,
        json={"model": "default", "prompt": "x", "max_tokens": 800, "stream": True},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
        trust_env=False,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        reload()
        stub.wait_until(lambda: status(key) == 401, 10)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert status(stub.key("alpha")) == 200
