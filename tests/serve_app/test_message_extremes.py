"""Whatever a request or a config may hold passes the sockets between gateways, fair queue and engines unchanged."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.channel_messages import (
    MAX_SUBMIT_TOKENS,
    Abort,
    Renew,
    StepMessage,
    Submit,
    SubmitAnswer,
    pack_answer,
    pack_request,
    unpack_answer,
    unpack_request,
)
from engine_actor.message_socket import MAX_BYTES, pack
from engine_actor.report import pack_report, unpack_report
from engine_actor.request import (
    EngineRequest,
    RequestTimings,
    RequestUsage,
    SamplingParams,
    StreamRow,
    TokenLogprob,
)
from policies.fair_queue import TenantSnapshot
from policies.guardrails import ProtectionLines
from policies.latency_model import StepEstimate
from policies.output_length import OutputLength
from policies.tickets import EngineReport, Grant, Refusal, Ticket
from serve_app.api.body import parse_body
from serve_app.api.endpoints import ParsedRequest, parse_completion
from serve_app.api.errors import ApiError
from serve_app.api.sampling_fields import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from serve_app.api.schemas import MAX_PROMPTS, CompletionRequest
from serve_app.queue_messages import (
    QueueSnapshot,
    Tell,
    Withdraw,
    pack_question,
    pack_reply,
    unpack_question,
    unpack_reply,
)
from serve_app.sequence import Sequence
from serve_app.text.model_text import stub_model_text

MODEL_LEN = 2**18

counts = st.integers(0, 2**31 - 1)
integers = st.integers(-(2**63), 2**64 - 1)
hashes = st.integers(0, 2**64 - 1)
floats = st.floats(allow_nan=False)
texts = st.text(max_size=20)
ids = st.lists(counts, max_size=20)
keys = st.tuples(texts, counts)


def tuples(*parts: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of any length of the strategy, or of the tuples of several."""
    return st.lists(parts[0] if len(parts) == 1 else st.tuples(*parts), max_size=4).map(tuple)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


logprobs = tuples(st.builds(TokenLogprob, counts, floats, tuples(counts, floats)))
sampling = st.builds(
    SamplingParams,
    counts,
    floats,
    counts,
    floats,
    maybe(integers),
    tuples(counts),
    floats,
    counts,
    *[floats] * 3,
    tuples(counts, floats),
    maybe(counts),
    maybe(counts),
)
engine_requests = st.builds(
    EngineRequest,
    *(texts, counts, texts, texts, ids, sampling, texts, floats, floats, counts, counts),
    *[maybe(floats)] * 2,
)
rows = st.builds(
    StreamRow,
    texts,
    counts,
    tuples(counts),
    st.sampled_from([None, "stop", "length", "abort", "error"]),
    maybe(texts),
    maybe(st.builds(RequestUsage, counts, counts, counts)),
    maybe(st.builds(RequestTimings, *[maybe(floats)] * 3, tuples(floats, counts), counts)),
    logprobs,
    logprobs,
)
by_tenant = st.dictionaries(texts, counts, max_size=4)
reports = st.builds(
    EngineReport,
    *(texts, integers, counts, *[st.dictionaries(texts, floats, max_size=4)] * 2, *[counts] * 8),
    accepted=tuples(keys),
    draining=st.booleans(),
    live_sequences=by_tenant,
    tenant_pages=by_tenant,
    tenant_prefill_tokens=by_tenant,
    first_tokens=tuples(keys),
    completed=tuples(keys),
    step_estimate=maybe(st.builds(StepEstimate, *[floats] * 6)),
    decode_context=counts,
    peak_kv_tokens=counts,
    decode_step_seconds=maybe(floats),
    remaining=tuples(counts, counts),
    page_hashes_added=tuples(hashes),
    page_hashes_removed=tuples(hashes),
)
tickets = st.builds(
    Ticket,
    *(texts, counts, texts, floats, counts, counts, counts),
    st.sampled_from(["interactive", "default", "batch"]),
    *(maybe(texts), *[maybe(floats)] * 2, st.booleans(), st.booleans(), counts, floats, floats),
    tuples(hashes),
)
questions = (
    tickets
    | st.builds(Withdraw, texts, counts)
    | st.builds(Tell, st.builds(ProtectionLines, *[maybe(floats)] * 5), tuples(texts, counts))
)
replies = (
    st.builds(Grant, texts, *[counts] * 2, texts, counts, *[floats] * 2, st.booleans(), maybe(floats))
    | st.builds(Refusal, texts, counts, texts, texts, *[maybe(floats)] * 2)
    | st.builds(
        QueueSnapshot,
        *(counts, tuples(texts), counts),
        st.dictionaries(texts, st.builds(TenantSnapshot, counts, *[floats] * 4), max_size=4),
        counts,
        st.dictionaries(texts, st.builds(OutputLength, floats, counts), max_size=4),
    )
)


@settings(max_examples=40)
@given(
    st.builds(Submit, counts, st.lists(engine_requests, max_size=3))
    | st.builds(Abort, st.lists(keys))
    | st.builds(Renew, st.lists(keys))
)
def test_what_a_gateway_asks_of_an_engine(message: Submit | Abort | Renew) -> None:
    assert unpack_request(pack_request(message)) == message


@settings(max_examples=40)
@given(
    st.builds(StepMessage, texts, integers, counts, integers, tuples(rows))
    | st.builds(SubmitAnswer, counts, maybe(texts))
)
def test_what_an_engine_answers(message: StepMessage | SubmitAnswer) -> None:
    assert unpack_answer(pack_answer(message)) == message


@settings(max_examples=40)
@given(reports)
def test_what_an_engine_reports(report: EngineReport) -> None:
    assert unpack_report(pack_report(report)) == report


@settings(max_examples=40)
@given(questions)
def test_what_a_gateway_asks_of_a_queue(message: Ticket | Withdraw | Tell) -> None:
    assert unpack_question(pack_question(message)) == message


@settings(max_examples=40)
@given(replies)
def test_what_a_queue_answers(message: Grant | Refusal | QueueSnapshot) -> None:
    assert unpack_reply(pack_reply(message)) == message


BODY = {"model": "m", "prompt": [0, 255]}
EXTREMES: list[tuple[str, list[Any]]] = [
    ("seed", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1]),
    ("n", [1, 8]),
    ("max_tokens", [1, MODEL_LEN - 2]),
    ("min_tokens", [0, 16]),
    ("top_k", [-1, 0, 2**31 - 1]),
    ("top_p", [5e-324, 1, 1.0]),
    ("temperature", [0, -0.0, 5e-324, 2]),
    ("min_p", [0, 1]),
    ("presence_penalty", [-2, 2]),
    ("repetition_penalty", [0.1, 10]),
    ("logprobs", [0, 5]),
    ("logit_bias", [{}, {str(token): -100 for token in range(256)}, {"7": 5e-324}]),
    ("stop_token_ids", [[], [0, 255] * (MAX_STOP_TOKEN_IDS // 2)]),
    ("stop", ["\U0010ffff", ["\ufffe"] * 16]),
    ("user", ["\ud7ff" * 1000, "\u202e"]),
    ("prompt", ["\ufdfa" * 1000, "\U0010ffff", [[1]] * MAX_PROMPTS]),
]


def submitted(parsed: ParsedRequest) -> Submit:
    """As a gateway hands the request to an engine."""
    choices = [Sequence(index, parsed, TEXT) for index in range(len(parsed.prompts) * parsed.n)]
    return Submit(
        1,
        [EngineRequest(f"r/{c.index}", 1, "r", "a", c.prompt, c.sampling(parsed.sampling)) for c in choices],
    )


TEXT = stub_model_text(MODEL_LEN)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in EXTREMES for value in values], ids=lambda v: None
)
def test_a_field_at_the_end_of_its_range_reaches_the_engine(field: str, value: Any) -> None:
    for choices in ({}, {"n": 8}):
        raw = json.dumps({**BODY, **choices, field: value}).encode()
        message = submitted(parse_completion(parse_body(raw, CompletionRequest), TEXT, MODEL_LEN))
        copy = unpack_request(pack_request(message))
        assert copy == message and isinstance(copy, Submit)
        kinds = [[type(each) for each in dataclasses.astuple(r.sampling)] for r in message.requests]
        assert [[type(each) for each in dataclasses.astuple(r.sampling)] for r in copy.requests] == kinds


def test_the_largest_request_fits_a_message_and_a_larger_one_is_refused() -> None:
    """A message above MAX_BYTES would end the connection, and with it the streams of everybody."""
    body = {**BODY, "max_tokens": 1, "n": 8, "prompt": [[7] * MODEL_LEN] * 5}
    with pytest.raises(ApiError, match="10485760 tokens in all") as refused:
        parse_completion(parse_body(json.dumps(body).encode(), CompletionRequest), TEXT, 2 * MODEL_LEN)
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    bias = tuple((2**31 - 1 - place, 0.5) for place in range(MAX_LOGIT_BIAS))
    stops = tuple(range(2**31 - MAX_STOP_TOKEN_IDS, 2**31))
    params = SamplingParams(2**31 - 1, seed=2**64 - 1, logit_bias=bias, stop_token_ids=stops)
    one = EngineRequest("r" * 40, 1, "r" * 40, "a" * 64, [], params, "n" * 64)
    requests = 8 * MAX_PROMPTS * len(pack(one))
    tokens = MAX_SUBMIT_TOKENS // 1000 * len(pack([2**31 - 1] * 1000))
    assert requests + tokens < MAX_BYTES
