from __future__ import annotations

import io
import json
import multiprocessing
from pathlib import Path

import pytest

from engine_actor.request import RequestUsage
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.gateway import GatewayTelemetry
from serve_app.telemetry.jsonl import RotatingLines
from serve_app.telemetry.metrics import GatewayMetrics
from serve_app.telemetry.records import RequestRecord
from serve_app.telemetry.tracing import NoTracing, TracingConfig, build_tracing


def record(**fields: object) -> RequestRecord:
    result = RequestRecord(
        request="r1", route="/v1/chat/completions", started_wall_ns=1_700_000_000_123_456_789
    )
    result.tenant, result.model, result.key_fingerprint = "alpha", "tiny", "fp12"
    result.authenticated_ms = 0.25
    result.enqueued_ms, result.granted_ms, result.first_token_ms = 1.0, 3.5, 40.12345
    result.usage = RequestUsage(computed_input=74, cached_input=16, output=5)
    result.outcome, result.status, result.finished_ms, result.finish_reasons = "ok", 200, 95.0, ["stop"]
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def test_one_object_a_line() -> None:
    stream = io.StringIO()
    AccessLog(stream=stream).write(record())
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry == {
        "time": "2023-11-14T22:13:20.123Z",
        "request": "r1",
        "trace": None,
        "tenant": "alpha",
        "key": "fp12",
        "model": "tiny",
        "route": "/v1/chat/completions",
        "stream": False,
        "status": 200,
        "outcome": "ok",
        "code": None,
        "finish_reasons": ["stop"],
        "engine": None,
        "admission": None,
        "deadline_met": None,
        "attempts": 0,
        "input_tokens": 90,
        "cached_tokens": 16,
        "output_tokens": 5,
        "queue_ms": 2.5,
        "ttft_ms": 40.123,
        "e2e_ms": 95.0,
        "stages_ms": {
            "auth": 0.25,
            "tokenise": None,
            "reserve": None,
            "queue": 2.5,
            "submit": None,
            "engine": None,
        },
    }


@pytest.mark.parametrize(
    "text", ['x\r\n{"status":200}', "a\u2028b\u0085c\x1b[31m\x00", "m" * 100_000, '"\\', "\ud800"]
)
def test_client_text_is_bounded_and_stays_on_its_line(text: str) -> None:
    stream = io.StringIO()
    AccessLog(stream=stream).write(record(request=text, model=text, route=text))
    written = stream.getvalue()
    assert written.endswith("\n") and written.count("\n") == 1
    assert len(written) < 2000
    assert written.isascii() and "\r" not in written and "\x1b" not in written
    entry = json.loads(written)
    assert entry["status"] == 200 and entry["request"].isprintable()


def test_file_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "access.jsonl"
    for _ in range(2):
        log = AccessLog(path)
        log.write(record())
        log.close()
    assert [json.loads(line)["request"] for line in path.read_text().splitlines()] == ["r1", "r1"]


def test_bad_path_shows_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        AccessLog(tmp_path / "file" / "access.jsonl")


def test_G11_files_rotate_with_a_cap(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    lines = RotatingLines(path, max_bytes=1000, backups=2)
    for index in range(200):
        assert lines.write([f"{index:099d}"])
    lines.close()
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"access.jsonl", "access.jsonl.1", "access.jsonl.2", "access.jsonl.lock"}
    kept = [int(line) for name in ("access.jsonl.2", "access.jsonl.1", "access.jsonl")
            for line in (tmp_path / name).read_text().splitlines()]  # fmt: skip
    assert kept == list(range(kept[0], 200)) and len(kept) == 30
    assert all((tmp_path / name).stat().st_size <= 1000 for name in names)


def _append(path: Path, writer: int) -> None:
    lines = RotatingLines(path, max_bytes=20_000, backups=50)
    for index in range(200):
        lines.write([json.dumps({"writer": writer, "index": index, "fill": "x" * 100})])


def test_several_processes_append_and_rotate_one_file(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = [
        json.loads(line)
        for file in tmp_path.glob("spans.jsonl*")
        if file.suffix != ".lock"
        for line in file.read_text().splitlines()
    ]
    assert len(list(tmp_path.glob("spans.jsonl.[0-9]*"))) >= 2
    assert {(entry["writer"], entry["index"]) for entry in found} == {
        (w, i) for w in range(3) for i in range(200)
    }
    assert len(found) == 600


def test_G11_full_disk_loses_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(Path("/dev/full"))
    for _ in range(5):
        log.write(record())
    log.close()
    assert len([entry for entry in caplog.records if "lost" in entry.message]) == 1


def test_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    stream.close()
    log.write(record())


def telemetry(stream: io.StringIO, tmp_path: Path) -> tuple[GatewayTelemetry, Path]:
    spans = tmp_path / "spans.jsonl"
    tracing = build_tracing(TracingConfig(exporter="file", path=spans))
    return GatewayTelemetry(tracing, GatewayMetrics(["tiny"]), AccessLog(stream=stream)), spans


def test_G14_a_request_ends_once_whatever_path_ends_it(tmp_path: Path) -> None:
    stream = io.StringIO()
    gateway, spans = telemetry(stream, tmp_path)
    request = gateway.begin("r1", "/v1/chat/completions", {"traceparent": "nonsense"})
    gateway.end(request, "cancelled", 499)
    gateway.end(request, "ok", 200)
    gateway.end(request, "error", 500, "internal_error")
    gateway.close()
    roots = [json.loads(line) for line in spans.read_text().splitlines()]
    assert [root["attributes"]["evenhand.outcome"] for root in roots] == ["cancelled"]
    assert [json.loads(line)["outcome"] for line in stream.getvalue().splitlines()] == ["cancelled"]
    assert json.loads(stream.getvalue())["trace"] == roots[0]["trace_id"]
    counted = [
        line for line in gateway.metrics.render().decode().splitlines() if line.startswith("requests_total{")
    ]
    assert counted == ['requests_total{code="",model="unknown",outcome="cancelled",tenant="unknown"} 1.0']


def test_failing_telemetry_does_not_fail_the_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(NoTracing):
        def finish(self, record: RequestRecord) -> None:
            raise RuntimeError("broken")

    stream = io.StringIO()
    gateway = GatewayTelemetry(Broken(), GatewayMetrics(["tiny"]), AccessLog(stream=stream))
    for index in range(3):
        gateway.end(gateway.begin(f"r{index}", "/v1/completions", {}), "ok", 200)
    assert len(stream.getvalue().splitlines()) == 3
    assert len([entry for entry in caplog.records if "spans failed" in entry.message]) == 1
