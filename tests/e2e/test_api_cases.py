"""What went wrong in other servers' APIs, tried on ours: each test names its case of group A."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
JSON = {"Content-Type": "application/json"}
VOCABULARY = 259  # of the stub engine: its tokens are bytes


@pytest.fixture(autouse=True)
def canary(stub: Any) -> Iterator[None]:
    """A greedy request answers the same before and after every trial."""
    request = {"model": "default", "prompt": "canary", "temperature": 0, "max_tokens": 5}
    with stub.http("beta") as client:
        before = client.post(TEXT, json=request).json()["choices"]
        yield
        after = client.post(TEXT, json=request)
    assert after.status_code == 200 and after.json()["choices"] == before


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left(stub: Any) -> Iterator[None]:
    yield
    stub.wait_until(lambda: stub.is_idle() and stub.slots("alpha") == stub.slots("beta") == 0, 10)


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    return {"model": "default", "max_tokens": 6, **prompt, **fields}


def post(stub: Any, path: str, request: dict[str, Any] | bytes, tenant: str = "alpha") -> httpx.Response:
    content = request if isinstance(request, bytes) else json.dumps(request).encode()
    with stub.http(tenant) as client:
        return client.post(path, content=content, headers=JSON)


def refusal(answer: httpx.Response, status: int = 400, code: str = "invalid_request") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    return dict(error)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    *chunks, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_A01_usage_chunk_comes_after_the_finish_chunk(stub: Any, path: str) -> None:
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = events(post(stub, path, body(path, stream=True, **options)))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None for chunk in chunks)
    for options in ({"stream_options": {"include_usage": False}}, {"stream_options": None}, {}):
        chunks = events(post(stub, path, body(path, stream=True, **options)))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert not any("usage" in chunk for chunk in chunks)
    for stream in (False, None):
        request = body(path, stream=stream, stream_options={"include_usage": True})
        assert refusal(post(stub, path, request))["param"] == "stream_options"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_A01_continuous_usage(stub: Any, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(post(stub, path, body(path, stream=True, stream_options=options)))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("start", "stop", "length", "stopped"),
    [
        (3, [(7, 14)], 24, True),  # over seven tokens
        (3, [(10, 14), (7, 20)], 24, True),  # overlapping: the one that ends first
        (3, "false start", 24, False),
        (3, [(18, 24)], 24, True),  # ends with the last token allowed
        (3, [(20, 26)], 24, False),  # would end after it
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_A03_stop_strings_over_several_tokens(
    stub: Any, path: str, start: int, stop: Any, length: int, stopped: bool
) -> None:
    whole = post(stub, path, body(path, max_tokens=30)).json()["choices"][0]
    full = whole["text"] if path == TEXT else whole["message"]["content"]
    stops = [full[8:11] + "#"] if stop == "false start" else [full[begin:end] for begin, end in stop]
    request = body(path, max_tokens=length, stop=stops)
    choice = post(stub, path, request).json()["choices"][0]
    text = choice["text"] if path == TEXT else choice["message"]["content"]
    chunks = events(post(stub, path, {**request, "stream": True}))
    ends = {full.find(s): s for s in stops if full.find(s) >= 0 and full.find(s) + len(s) <= length}
    cut = min(ends, key=lambda at: at + len(ends[at])) if ends else length
    assert text == full[:cut] == text_of(chunks)
    assert bool(ends) is stopped
    expected = "stop" if stopped else "length"
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == expected


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", '"0.5"', "true", "[]", "{}", "-3", "2.1", "1e308"]
RANGES = {
    "temperature": NUMBERS,
    "top_p": [*NUMBERS, "0", "-0.1", "1.0001"],
    "min_p": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "top_k": ["0.01", "-2", "1000000000000", "NaN", '"5"', "true"],
    "n": ["0", "-1", "1000000", "1.5", "NaN"],
    "max_tokens": ["0", "-1", "1e3", "10" * 200, "true", "NaN"],
    "stream": ["1", '"true"', "[]"],
}


@pytest.mark.parametrize("field", RANGES)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_A10_values_out_of_range_stop_at_the_edge(stub: Any, path: str, field: str) -> None:
    request = body(path)
    request.pop(field, None)
    start = json.dumps(request)[:-1]
    for value in RANGES[field]:
        error = refusal(post(stub, path, f'{start}, "{field}": {value}}}'.encode()))
        assert error["param"] == field, value


def test_A12_seeds(stub: Any) -> None:
    for seed in (2**64, 10**40, 1.5, "7", -(2**63) - 1, True):
        assert refusal(post(stub, TEXT, body(TEXT, seed=seed)))["param"] == "seed"
    for seed in (-1, 0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)):
        answer = post(stub, TEXT, body(TEXT, seed=seed, temperature=1, n=2))
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2


BAD_IDS = [[VOCABULARY], [-1], [], [[]], [1.5], ["a", 1], [1, "a"], [[1, 2], [999_999]], [10**19], [[1], []]]


def test_A14_token_ids_outside_of_the_vocabulary(stub: Any) -> None:
    before = stub.metric("served_tokens_total", tenant="alpha")
    for prompt in BAD_IDS:
        assert str(refusal(post(stub, TEXT, body(TEXT, prompt=prompt)))["param"]).startswith("prompt")
    assert stub.metric("served_tokens_total", tenant="alpha") == before


def test_A15_sdk_classes(stub: Any) -> None:
    cases: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"max_tokens": 100_000}),
        (openai.NotFoundError, {"model": "nope"}),
    ]
    with stub.openai() as client:
        for kind, fields in cases:
            request = {"model": stub.model, "messages": HELLO, **fields}
            with pytest.raises(kind) as refused:
                client.chat.completions.create(**request)
            assert refused.value.param in (*fields, None) and refused.value.code
    with stub.http() as client:
        for method, path, status, code in (
            ("GET", CHAT, 405, "method_not_allowed"),
            ("POST", "/v1/embeddings", 404, "not_found"),
            ("GET", "/-/routes", 404, "not_found"),
            ("GET", "/-/healthz", 404, "not_found"),
            ("GET", "/%2d/routes", 404, "not_found"),
        ):
            refusal(client.request(method, path), status, code)


CONTEXT = 8192


@pytest.mark.parametrize("stream", [False, True])
def test_A17_context_length(stub: Any, stream: bool) -> None:
    def ask(ids: int, **fields: Any) -> httpx.Response:
        request = {"model": "default", "prompt": [7] * ids, "stream": stream, **fields}
        return post(stub, TEXT, request, "beta")

    for ids, tokens, param in (
        (CONTEXT, 1, "prompt"),
        (CONTEXT + 1, 1, "prompt"),
        (10 * CONTEXT, 1, "prompt"),
        (CONTEXT - 4, 5, "max_tokens"),
    ):
        error = refusal(ask(ids, max_tokens=tokens), 400, "context_length_exceeded")
        assert error["param"] == param
        assert str(CONTEXT) in error["message"] and str(ids) in error["message"]
    request = {"model": "default", "messages": HELLO, "max_completion_tokens": CONTEXT, "stream": stream}
    error = refusal(post(stub, CHAT, request), 400, "context_length_exceeded")
    assert error["param"] == "max_completion_tokens"
    answer = ask(CONTEXT - 4, max_tokens=4)
    assert answer.status_code == 200
    answer = ask(CONTEXT - 4)  # nothing asked for: as much as fits
    choice = (events(answer)[-1] if stream else answer.json())["choices"][0]
    assert choice["finish_reason"] == "length"
    assert stub.slots("beta") == 0


SCHEMAS: list[Any] = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}},
    {"type": "json_schema", "json_schema": {"name": "x"}},
    {"type": "regex", "pattern": "("},
    "json",
    [],
    7,
]


def test_A18_structured_output_is_refused_and_never_ignored(stub: Any) -> None:
    for wanted in SCHEMAS:
        for path in (CHAT, TEXT):
            assert refusal(post(stub, path, body(path, response_format=wanted)))["param"] == "response_format"
    assert post(stub, CHAT, body(CHAT, response_format={"type": "text"})).status_code == 200


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_grammar", "structured_outputs"])
def test_A18_other_names_of_it(stub: Any, field: str) -> None:
    assert refusal(post(stub, CHAT, body(CHAT, **{field: "^+a"})))["param"] == field


CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
PART = [{"type": "text", "text": "Hello"}]


@pytest.mark.parametrize(
    "messages",
    [
        [*HELLO, {"role": "assistant", "content": None, "tool_calls": CALL}],
        [*HELLO, {"role": "assistant", "content": "", "tool_calls": CALL}],
        [*HELLO, {"role": "assistant", "tool_calls": CALL}],
        [
            *HELLO,
            {"role": "assistant", "tool_calls": CALL},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        [
            *HELLO,
            {"role": "assistant", "tool_calls": CALL},
            {"role": "tool", "tool_call_id": "1", "content": PART},
        ],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *HELLO],
        [*HELLO, {"role": "assistant", "content": "the end"}],
        [*HELLO, {"role": "assistant", "content": None, "refusal": "I cannot help."}, *HELLO],
        [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}, *HELLO],
    ],
)
def test_A22_legal_conversations(stub: Any, messages: list[Any]) -> None:
    answer = post(stub, CHAT, body(CHAT, messages=messages))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_A22_text_and_parts_are_the_same(stub: Any, role: str) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    counts = {
        post(stub, CHAT, body(CHAT, messages=[{"role": role, "content": content}])).json()["usage"][
            "prompt_tokens"
        ]
        for content in ("Hello", PART, parts)
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "bot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([*HELLO, {"role": "user", "content": [*PART, {"type": "input_audio"}]}], "messages[1].content[1]"),
        ("Hello", "messages"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "refusal": "no"}], "messages[0].refusal"),
    ],
)
def test_A22_conversations_that_are_none(stub: Any, messages: Any, param: str) -> None:
    assert refusal(post(stub, CHAT, body(CHAT, messages=messages)))["param"] == param


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
def test_A24_tools_are_refused_and_never_ignored(stub: Any, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "unknown"}}
    for choice in (None, "auto", "required", named, 5):
        request = body(CHAT, tools=TOOLS, tool_choice=choice, stream=stream)
        assert refusal(post(stub, CHAT, request))["param"] in ("tools", "tool_choice")
    answer = post(stub, CHAT, body(CHAT, tools=TOOLS, tool_choice="none", stream=stream))
    assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("abc", 3), (["abc"], 3), (["a", "bc", "def"], 6), ([65, 66], 2), ([[65], [66, 67]], 3)],
)
def test_A25_prompt_forms(stub: Any, prompt: Any, tokens: int, n: int, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = post(stub, TEXT, body(TEXT, prompt=prompt, n=n, **options))
    prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    whole = post(stub, TEXT, body(TEXT, prompt=prompt, n=n)).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(prompts * n))
    usage = events(answer)[-1]["usage"] if stream else answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, 6 * prompts * n)
    if stream:
        chunks = events(answer)
        for choice in whole["choices"]:
            assert text_of(chunks, choice["index"]) == choice["text"]


def test_A25_every_member_counts(stub: Any) -> None:
    long = "x" * CONTEXT
    error = refusal(post(stub, TEXT, body(TEXT, prompt=["ok", long])), 400, "context_length_exceeded")
    assert error["param"] == "prompt"
    assert refusal(post(stub, TEXT, body(TEXT, prompt=["x"] * 1000)))["param"] == "prompt"
    answer = post(stub, TEXT, body(TEXT, prompt=["a", "b", "c"]), "narrow")
    refusal(answer, 429, "concurrency_limit_exceeded")  # two at once: three members are too many
    for field, value in (("best_of", 3), ("suffix", "end")):
        assert refusal(post(stub, TEXT, body(TEXT, **{field: value})))["param"] == field
    assert post(stub, TEXT, body(TEXT, best_of=2, n=2, suffix="")).status_code == 200
