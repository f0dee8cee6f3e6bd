"""What a request leaves behind: one trace, one line, some counts, and nothing of what was said."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
MARK = "zqxj-prompt-marker"
WRONG_KEY = "eh_marked_0000wrongkey0000"
DESIGN_METRICS = {
    "scheduler_iteration_latency_seconds_count",
    "prefill_chunk_size_tokens_count",
    "decode_batch_size_requests_count",
    "kv_cache_page_free_pages",
    "prefix_cache_hit_rate",
    "chunked_prefill_recompute_count",
    "kv_cache_page_reclaimed_pages_total",
    "served_tokens_total",
    "queue_wait_seconds_count",
    "admission_refusals_total",
    "requests_cancelled_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "requests_total",
}


@dataclass
class Traffic:
    """Requests of every kind that have ended, by a name that is also their request id."""

    spans: list[dict[str, Any]] = field(default_factory=list)
    traceparent: str = ""
    answered: dict[str, httpx.Headers] = field(default_factory=dict)

    def roots(self, request: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["attributes"].get("evenhand.request") == request]

    def root(self, request: str) -> dict[str, Any]:
        [root] = self.roots(request)
        return root

    def children(self, request: str) -> dict[str, dict[str, Any]]:
        """Spans under a root, by name; fails for two of one name."""
        root = self.root(request)
        children = [span for span in self.spans if span["parent_span_id"] == root["span_id"]]
        assert all(span["trace_id"] == root["trace_id"] for span in children)
        named = {span["name"]: span for span in children}
        assert len(named) == len(children)
        return named


@pytest.fixture(scope="module")
def traffic(stub: Any) -> Iterator[Traffic]:
    """One request of each kind by the tenant `marked`, waited for until its spans are written."""
    traffic = Traffic(traceparent=f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")
    body = {
        "model": stub.model,
        "messages": [{"role": "user", "content": f"{MARK} " + "word " * 100}],
        "max_tokens": 5,
    }

    def post(request: str, body: dict[str, Any], tenant: str | None = "marked", **headers: str) -> None:
        with stub.http(tenant) as client:
            answer = client.post(CHAT, json=body, headers={"x-request-id": request, **headers})
        traffic.answered[request] = answer.headers

    post("whole", body)
    post("stream", {**body, "stream": True}, traceparent=traffic.traceparent)
    post("two-choices", {**body, "n": 2, "stream": True})
    post("unsampled", body, traceparent=traffic.traceparent[:-2] + "00")
    post("bad-field", {**body, "temperature": 99})
    post("bad-field-text", {**body, "messages": [{"role": "user", "content": [{"type": MARK}]}]})
    post("too-long", {**body, "max_tokens": 100_000})
    post("no-model", {**body, "model": "gpt-4"})
    post("wrong-key", body, tenant=None, Authorization=f"Bearer {WRONG_KEY}")
    with stub.http("marked") as client:
        client.post(CHAT, content=f'{{"{MARK}": '.encode(), headers={"x-request-id": "bad-json"})
    with stub.openai("marked") as client:
        stream = client.chat.completions.create(
            **{**body, "max_tokens": 4000}, stream=True, extra_headers={"x-request-id": "cancelled"}
        )
        next(iter(stream))
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).chat.completions.create(
                **{**body, "max_tokens": 4000}, extra_headers={"x-request-id": "cancelled-whole"}
            )
    post("last", body)
    stub.wait_until(lambda: stub.is_idle() and stub.slots("marked") == 0, 5)

    def written() -> bool:
        traffic.spans = stub.spans()
        return bool(traffic.roots("last") and traffic.roots("cancelled-whole"))

    stub.wait_until(written, 15)
    yield traffic


def test_one_trace_per_request(traffic: Traffic) -> None:
    root, children = traffic.root("whole"), traffic.children("whole")
    assert root["parent_span_id"] is None
    assert root["name"] == "chat.completions" and root["kind"] == "SERVER"
    assert root["attributes"]["evenhand.outcome"] == "ok"
    assert root["attributes"]["evenhand.tenant"] == "marked"
    assert root["attributes"]["http.response.status_code"] == 200
    assert root["attributes"]["gen_ai.usage.output_tokens"] == 5
    assert {"authenticated", "validated", "reserved"} <= {event["name"] for event in root["events"]}
    assert set(children) == {"queue", "engine"}
    for child in children.values():
        assert root["start_ns"] <= child["start_ns"] <= child["end_ns"] <= root["end_ns"]


def test_a_stream_has_three_children(traffic: Traffic) -> None:
    children = traffic.children("stream")
    assert set(children) == {"queue", "engine", "stream"}
    assert children["queue"]["end_ns"] <= children["engine"]["start_ns"]
    assert children["engine"]["start_ns"] < children["stream"]["start_ns"]
    events = [event["name"] for event in children["engine"]["events"]]
    assert events.count("first_token") == 1
    assert 1 <= events.count("prefill_chunk") == children["engine"]["attributes"]["evenhand.prefill_chunks"]


def test_choices_share_a_trace(traffic: Traffic) -> None:
    events = traffic.children("two-choices")["engine"]["events"]
    firsts = [event["attributes"]["evenhand.sequence"] for event in events if event["name"] == "first_token"]
    assert sorted(firsts) == [0, 1]
    assert traffic.root("two-choices")["attributes"]["gen_ai.usage.output_tokens"] == 10


def test_a_caller_s_trace_goes_on(traffic: Traffic) -> None:
    _, trace_id, span_id, _ = traffic.traceparent.split("-")
    root = traffic.root("stream")
    assert (root["trace_id"], root["parent_span_id"]) == (trace_id, span_id)
    answered = traffic.answered["stream"]["traceparent"]
    assert answered == f"00-{trace_id}-{root['span_id']}-01"
    assert traffic.answered["whole"]["traceparent"].split("-")[1] == traffic.root("whole")["trace_id"]


def test_a_caller_that_does_not_sample_gets_no_span(traffic: Traffic) -> None:
    assert traffic.roots("unsampled") == []
    assert traffic.answered["unsampled"]["traceparent"].endswith("-00")


@pytest.mark.parametrize(
    ("request_id", "outcome", "status", "code"),
    [
        ("bad-field", "refused", 400, "invalid_request"),
        ("bad-json", "refused", 400, "invalid_request"),
        ("too-long", "refused", 400, "context_length_exceeded"),
        ("no-model", "refused", 404, "model_not_found"),
        ("wrong-key", "refused", 401, "invalid_api_key"),
        ("cancelled", "cancelled", 200, None),
        ("cancelled-whole", "cancelled", 499, None),
    ],
)
def test_whatever_happens_there_is_one_ended_root(
    stub: Any, traffic: Traffic, request_id: str, outcome: str, status: int, code: str | None
) -> None:
    root = traffic.root(request_id)
    assert root["end_ns"] > root["start_ns"]
    assert root["attributes"]["evenhand.outcome"] == outcome
    assert root["attributes"]["http.response.status_code"] == status
    assert root["attributes"].get("error.type") == code
    expected = set() if outcome == "refused" else {"queue", "engine"}
    assert set(traffic.children(request_id)) - {"stream"} == expected
    [line] = [line for line in stub.access_log() if line["request"] == request_id]
    assert (line["outcome"], line["status"], line["code"]) == (outcome, status, code)
    assert line["trace"] == root["trace_id"]
    assert line["tenant"] == (None if request_id == "wrong-key" else "marked")
    if outcome == "cancelled":
        assert 0 < line["output_tokens"] < 4000 and line["input_tokens"] > 500


def test_every_span_belongs_to_a_request(traffic: Traffic) -> None:
    ids = [span["span_id"] for span in traffic.spans]
    assert len(ids) == len(set(ids))
    roots = {span["span_id"] for span in traffic.spans if "evenhand.request" in span["attributes"]}
    for span in traffic.spans:
        assert span["span_id"] in roots or span["parent_span_id"] in roots


def test_metrics_have_the_names_of_the_design(stub: Any, traffic: Traffic) -> None:
    samples = stub.samples()
    assert {sample.name for sample in samples} >= DESIGN_METRICS
    mine = {"tenant": "marked"}
    assert stub.metric("requests_total", outcome="ok", **mine) == 5
    assert stub.metric("requests_total", outcome="cancelled", **mine) == 2
    assert stub.metric("admission_refusals_total", reason="invalid_request", **mine) == 3
    assert stub.metric("admission_refusals_total", reason="context_length_exceeded", **mine) == 1
    assert stub.metric("admission_refusals_total", reason="invalid_api_key", tenant="unknown") >= 1
    assert 0 < stub.metric("prefix_cache_hit_rate") < 1
    models = {sample.labels["model"] for sample in samples if "model" in sample.labels}
    assert models <= {"smollm2-135m-instruct", "default", "unknown", "other"}


@pytest.mark.parametrize("key", [None, "eh_alpha_demo", "eh_metrics_key_for_test"])
def test_metrics_need_their_key(stub: Any, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with stub.http(None) as client:
        answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_F05_no_key_and_no_prompt_is_written_anywhere(stub: Any, traffic: Traffic) -> None:
    secret = {
        "a tenant's key": stub.key("marked"),
        "a wrong key": WRONG_KEY,
        "a prompt": MARK,
        "the metrics key": stub.metrics_key,
        "the password of Redis": stub.redis_settings()["requirepass"],
    }
    meant_for_secrets = {stub.config_path, *(stub.data_dir / "redis").glob("redis.*")}
    found = []
    for path in files_below(stub.directory, stub.ray_logs):
        if path in meant_for_secrets:
            continue
        content = path.read_bytes()
        found += [f"{name} in {path}" for name, text in secret.items() if text.encode() in content]
    assert found == []


def files_below(*directories: Path) -> Iterator[Path]:
    for directory in directories:
        files = [path for path in directory.rglob("*") if path.is_file() and not path.is_socket()]
        assert files, directory
        yield from files
