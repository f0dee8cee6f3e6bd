from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine_actor.request import RequestTimings, RequestUsage
from serve_app.telemetry.records import EngineTimings, RequestRecord
from serve_app.telemetry.span_export import QUEUE_REQUESTS, WholeRequests
from serve_app.telemetry.spans import SpanTracing
from serve_app.telemetry.tracing import NoTracing, TracingConfig, build_tracing, outgoing_headers

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
START_NS = 1_700_000_000_000_000_000


def ms(value: float) -> int:
    return START_NS + round(value * 1e6)


def complete_record(stream: bool = True) -> RequestRecord:
    record = RequestRecord(request="r1", route="/v1/chat/completions", started_wall_ns=START_NS)
    record.tenant, record.model, record.stream = "alpha", "tiny", stream
    record.key_fingerprint = "fp12"
    record.authenticated_ms, record.validated_ms, record.reserved_ms = 1.0, 2.0, 3.0
    record.enqueued_ms, record.granted_ms, record.submitted_ms = 4.0, 10.0, 11.0
    record.first_token_ms, record.last_token_ms, record.finished_ms = 50.0, 90.0, 95.0
    record.attempts, record.engine = 1, "engine-0"
    timings = RequestTimings(
        scheduled_ms=2.0, first_token_ms=35.0, finished_ms=75.0, prefill_chunks=((20.0, 64), (34.0, 10))
    )
    record.engine_timings = [EngineTimings(wall_time_ns=ms(88.0), timings=timings)]
    record.usage = RequestUsage(computed_input=74, cached_input=16, output=5)
    record.outcome, record.status, record.finish_reasons = "ok", 200, ["stop"]
    return record


def traced(
    records: Sequence[RequestRecord], headers: dict[str, str] | None = None, ratio: float = 1.0
) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = SpanTracing(exporter, ratio, "test")
    for record in records:
        record.trace = tracing.begin(headers or {})
        tracing.finish(record)
    tracing.shutdown()
    return list(exporter.get_finished_spans())


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def test_one_root_with_its_children_at_the_recorded_times() -> None:
    spans = by_name(traced([complete_record()]))
    assert set(spans) == {"chat.completions", "queue", "engine", "stream"}
    root = spans["chat.completions"]
    assert root.parent is None
    assert root.kind is SpanKind.SERVER
    assert (root.start_time, root.end_time) == (START_NS, ms(95))
    for name in ("queue", "engine", "stream"):
        child = spans[name]
        assert child.parent is not None and child.parent.span_id == root.context.span_id
        assert child.context.trace_id == root.context.trace_id
    assert (spans["queue"].start_time, spans["queue"].end_time) == (ms(4), ms(10))
    assert (spans["stream"].start_time, spans["stream"].end_time) == (ms(50), ms(95))
    assert (spans["engine"].start_time, spans["engine"].end_time) == (ms(13), ms(88))
    events = [(e.name, e.timestamp, dict(e.attributes or {})) for e in spans["engine"].events]
    assert events == [
        ("prefill_chunk", ms(33), {"evenhand.tokens": 64, "evenhand.sequence": 0}),
        ("prefill_chunk", ms(47), {"evenhand.tokens": 10, "evenhand.sequence": 0}),
        ("first_token", ms(48), {"evenhand.sequence": 0}),
    ]
    assert [event.name for event in root.events] == ["authenticated", "validated", "reserved"]


def test_root_attributes_name_tenant_tokens_and_outcome() -> None:
    attributes = by_name(traced([complete_record()]))["chat.completions"].attributes
    assert attributes is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 90,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
        "evenhand.tenant": "alpha",
        "evenhand.outcome": "ok",
    }
    assert {name: attributes[name] for name in expected} == expected
    assert "error.type" not in attributes
    assert "fp12" not in map(str, attributes.values())


def test_spans_encode_for_otlp() -> None:
    spans = traced([complete_record()], {"traceparent": SAMPLED, "tracestate": "vendor=1"})
    encoded = encode_spans(spans).resource_spans[0].scope_spans[0].spans
    root = next(span for span in encoded if span.name == "chat.completions")
    assert root.parent_span_id.hex() == PARENT_ID
    assert root.trace_state == "vendor=1"


@pytest.mark.parametrize("stream", [True, False])
def test_G09_caller_is_the_parent(stream: bool) -> None:
    record = complete_record(stream)
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=1,other=2"}
    spans = by_name(traced([record], headers))
    root = spans["chat.completions"]
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT_ID and root.parent.is_remote
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}
    assert outgoing_headers(record) == {
        "traceparent": f"00-{TRACE_ID}-{root.context.span_id:016x}-01",
        "tracestate": "vendor=1,other=2",
    }
    assert ("stream" in spans) is stream


MALFORMED = [
    "",
    "garbage",
    f"00-{'0' * 32}-{PARENT_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    f"ff-{TRACE_ID}-{PARENT_ID}-01",
    f"00-{TRACE_ID}-{PARENT_ID}-01-extra",
    f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
    f"00-{TRACE_ID[:-1]}-{PARENT_ID}-01",
    f"00-{TRACE_ID}-{PARENT_ID}-0g",
    f"00-{TRACE_ID}-{PARENT_ID}",
    f"{SAMPLED},{SAMPLED}",
    "00-" + "4" * 10_000,
    "\u0664" * 55,
]


@pytest.mark.parametrize("value", MALFORMED)
def test_G09_malformed_context_is_ignored(value: str) -> None:
    (root,) = [s for s in traced([complete_record()], {"traceparent": value}) if s.kind is SpanKind.SERVER]
    assert root.parent is None
    assert root.context.trace_id not in (0, int(TRACE_ID, 16))
    assert NoTracing().begin({"traceparent": value}) is None


@pytest.mark.parametrize("value", ["", "=", "a" * 100_000, "no-equals", "k=v," * 100, "\r\nx: y", "ключ=v"])
def test_G09_bad_tracestate_loses_only_itself(value: str) -> None:
    record = complete_record()
    traced([record], {"traceparent": SAMPLED, "tracestate": value})
    assert record.trace is not None and record.trace.parent_span_id == int(PARENT_ID, 16)
    assert all(c.isprintable() and c.isascii() for c in outgoing_headers(record).get("tracestate", ""))


def test_G09_unsampled_stays_unsampled_and_is_passed_on() -> None:
    record = complete_record()
    assert traced([record], {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}) == []
    assert record.trace is not None
    sent = outgoing_headers(record)["traceparent"]
    assert sent.startswith(f"00-{TRACE_ID}-") and sent.endswith("-00")


def test_G09_sampled_caller_wins_over_the_ratio() -> None:
    assert len(traced([complete_record()], {"traceparent": SAMPLED}, ratio=0.0)) == 4
    assert traced([complete_record()], ratio=0.0) == []


def test_sampling_ratio_decides_at_arrival_as_at_the_end() -> None:
    records = [complete_record() for _ in range(400)]
    roots = {span.context.span_id for span in traced(records, ratio=0.5) if span.name == "chat.completions"}
    chosen = {record.trace.span_id for record in records if record.trace and record.trace.sampled}
    assert roots == chosen
    assert 100 < len(chosen) < 300


def test_G09_context_ids_are_known_before_the_end_and_unique() -> None:
    records = [complete_record() for _ in range(50)]
    spans = traced(records)
    roots = [span for span in spans if span.kind is SpanKind.SERVER]
    assert [span.context.span_id for span in roots] == [r.trace.span_id for r in records if r.trace]
    assert [span.context.trace_id for span in roots] == [r.trace.trace_id for r in records if r.trace]
    assert len({span.context.span_id for span in spans}) == len(spans) == 200


def test_G14_refused_request_has_a_root_and_no_children() -> None:
    record = RequestRecord(request="r", route="/v1/completions", started_wall_ns=START_NS)
    record.finish("refused", 429, "rate_limit_exceeded")
    (root,) = traced([record])
    assert root.name == "completions"
    assert root.attributes is not None
    assert root.attributes["evenhand.outcome"] == "refused"
    assert root.attributes["error.type"] == "rate_limit_exceeded"
    assert root.attributes["gen_ai.usage.output_tokens"] == 0
    assert root.status.status_code is StatusCode.UNSET  # a client's limit is no failure of the server


def test_G14_client_leaves_at_each_stage() -> None:
    def left(**marks: float) -> set[str]:
        record = RequestRecord(
            request="r", route="/v1/chat/completions", started_wall_ns=START_NS, stream=True
        )
        for name, value in marks.items():
            setattr(record, name, value)
        record.finish("cancelled", 499)
        record.finished_ms = 100.0
        spans = traced([record])
        (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
        assert root.attributes is not None and root.attributes["evenhand.outcome"] == "cancelled"
        for span in spans:
            assert span.start_time is not None and span.end_time is not None
            assert START_NS <= span.start_time <= span.end_time <= ms(100)
        return {span.name for span in spans} - {"chat.completions"}

    assert left() == set()
    assert left(enqueued_ms=1) == {"queue"}
    assert left(enqueued_ms=1, granted_ms=2) == {"queue"}
    assert left(enqueued_ms=1, granted_ms=2, submitted_ms=3) == {"queue", "engine"}
    assert left(enqueued_ms=1, granted_ms=2, submitted_ms=3, first_token_ms=9) == {
        "queue",
        "engine",
        "stream",
    }


def test_G14_engine_crash_is_an_error_with_the_gateways_own_times() -> None:
    record = complete_record()
    record.engine_timings = []
    record.outcome, record.error_code = "error", "engine_unavailable"
    spans = by_name(traced([record]))
    assert spans["chat.completions"].status.status_code is StatusCode.ERROR
    assert (spans["engine"].start_time, spans["engine"].end_time) == (ms(11), ms(95))


def test_G09_a_second_attempt_stays_in_the_trace_with_its_own_times() -> None:
    record = complete_record()
    record.new_attempt(60.0)
    assert (record.phase, record.queue_ms) == ("queue", 35.0)
    record.granted_ms, record.submitted_ms = 65.0, 66.0
    spans = by_name(traced([record], {"traceparent": SAMPLED}))
    assert (spans["queue"].start_time, spans["queue"].end_time) == (ms(60), ms(65))
    assert (spans["engine"].start_time, spans["engine"].end_time) == (ms(66), ms(95))
    root = spans["chat.completions"]
    assert root.attributes is not None and root.attributes["evenhand.attempts"] == 2
    assert "stream" not in spans  # the lost run sent nothing
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}


@pytest.mark.parametrize("skew_ms", [-3_600_000.0, 3_600_000.0])
def test_engine_span_stays_inside_its_parent_when_clocks_differ(skew_ms: float) -> None:
    record = complete_record()
    (entry,) = record.engine_timings
    record.engine_timings = [EngineTimings(entry.wall_time_ns + round(skew_ms * 1e6), entry.timings)]
    engine = by_name(traced([record]))["engine"]
    assert engine.start_time is not None and engine.end_time is not None
    assert ms(11) <= engine.start_time and engine.end_time <= ms(95)
    assert engine.end_time - engine.start_time == 75_000_000
    assert all(engine.start_time <= event.timestamp <= engine.end_time for event in engine.events)


def test_long_prompts_do_not_make_unbounded_events() -> None:
    record = complete_record()
    chunks = tuple((float(i) / 1000, 16) for i in range(5000))
    timings = RequestTimings(scheduled_ms=0.0, first_token_ms=35.0, finished_ms=75.0, prefill_chunks=chunks)
    record.engine_timings = [EngineTimings(ms(88), timings)]
    engine = by_name(traced([record]))["engine"]
    assert len(engine.events) == 128
    assert engine.events[-1].name == "first_token"
    assert engine.dropped_events == 5001 - 128
    assert engine.attributes is not None and engine.attributes["evenhand.prefill_chunks"] == 5000


class StuckExporter(SpanExporter):
    """A collector that answers only once it is told to, and fails every other batch."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.called = threading.Event()
        self.kept: list[ReadableSpan] = []
        self.batches = 0
        self.seen = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.answer.wait(60)
        self.batches += 1
        self.seen += len(spans)
        if self.batches % 2:
            self.kept.extend(spans)
            return SpanExportResult.SUCCESS
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.answer.set()


def assert_no_orphans(spans: Sequence[ReadableSpan]) -> None:
    roots = {span.context.span_id for span in spans if span.kind is SpanKind.SERVER}
    orphans = [span for span in spans if span.parent is not None and span.parent.span_id not in roots]
    assert roots and not orphans


def test_G14_stuck_collector_bounds_the_queue_and_leaves_no_orphans() -> None:
    exporter = StuckExporter()
    tracing = SpanTracing(exporter, 1.0, "test")
    for _ in range(3000):  # more than the queue takes
        record = complete_record()
        record.trace = tracing.begin({})
        tracing.finish(record)
    assert exporter.called.wait(30)
    exporter.answer.set()
    tracing.shutdown(30)
    assert_no_orphans(exporter.kept)
    assert exporter.seen == QUEUE_REQUESTS * 4  # whole requests, and no more than the queue takes
    assert 0 < len(exporter.kept) < exporter.seen


def test_G14_shutdown_does_not_wait_for_a_stuck_collector() -> None:
    exporter = StuckExporter()
    tracing = SpanTracing(exporter, 1.0, "test")
    record = complete_record()
    record.trace = tracing.begin({})
    tracing.finish(record)
    done = threading.Thread(target=tracing.shutdown, args=(0.05,), daemon=True)
    done.start()
    done.join(20)  # without the bound it would take until the exporter answers: 60 s
    assert not done.is_alive()


def test_batches_are_cut_between_requests() -> None:
    spans = traced([complete_record() for _ in range(3)])
    inner = InMemorySpanExporter()
    whole = WholeRequests(inner)
    for start in range(0, len(spans), 5):  # 12 spans of 4 a request, in batches of 5
        whole.export(spans[start : start + 5])
        exported = inner.get_finished_spans()
        assert len(exported) % 4 == 0
        assert_no_orphans(exported)
    assert len(inner.get_finished_spans()) == 12


def test_default_makes_nothing_of_the_sdk() -> None:
    script = (
        "import sys\n"
        "from serve_app.telemetry.tracing import TracingConfig, build_tracing\n"
        "tracing = build_tracing(TracingConfig())\n"
        "assert tracing.begin({}) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_without_tracing_a_callers_context_passes_through() -> None:
    record = complete_record()
    record.trace = NoTracing().begin({"traceparent": SAMPLED, "tracestate": "vendor=1"})
    assert outgoing_headers(record) == {"traceparent": SAMPLED, "tracestate": "vendor=1"}


def test_global_provider_is_left_alone() -> None:
    before = trace.get_tracer_provider()
    traced([complete_record()])
    assert trace.get_tracer_provider() is before


def test_file_exporter_writes_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "spans.jsonl"
    first = build_tracing(TracingConfig(exporter="file", path=path))
    second = build_tracing(TracingConfig(exporter="file", path=path))
    for tracing in (first, second, first):
        record = complete_record()
        record.trace = tracing.begin({"traceparent": SAMPLED})
        tracing.finish(record)
    first.shutdown()
    second.shutdown()
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(spans) == 12
    roots = [span for span in spans if span["name"] == "chat.completions"]
    assert len(roots) == 3
    assert {span["trace_id"] for span in spans} == {TRACE_ID}
    assert {span["parent_span_id"] for span in roots} == {PARENT_ID}
    assert roots[0]["start_ns"] == START_NS and roots[0]["end_ns"] == ms(95)
    assert roots[0]["attributes"]["gen_ai.usage.output_tokens"] == 5
    assert roots[0]["resource"]["service.name"] == "evenhand-gateway"


def test_otlp_exporter_posts_to_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    serving.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        tracing = build_tracing(TracingConfig(exporter="otlp", endpoint=endpoint))
        record = complete_record()
        record.trace = tracing.begin({"traceparent": SAMPLED})
        tracing.finish(record)
        tracing.shutdown(30)
    finally:
        server.shutdown()
        server.server_close()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert sorted(span.name for span in spans) == ["chat.completions", "engine", "queue", "stream"]
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}


def test_file_exporter_needs_a_path() -> None:
    with pytest.raises(ValueError, match="path"):
        build_tracing(TracingConfig(exporter="file"))
