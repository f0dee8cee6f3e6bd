from __future__ import annotations

import json
import time
from typing import Any

import pytest

from serve_app.api.body import parse_body
from serve_app.api.errors import ApiError
from serve_app.api.sampling_fields import SamplingFields
from serve_app.api.schemas import ChatCompletionRequest, CompletionRequest
from serve_app.api.unsupported import UNSUPPORTED

MESSAGES = [{"role": "user", "content": "hi"}]


SAMPLING_FIELDS = tuple(SamplingFields.model_fields)


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(
        json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), ChatCompletionRequest
    )


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionRequest)


def refusal(raw: bytes, model: type[Any] = ChatCompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(raw, model)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    # Neither our classes nor the library's links may show.
    assert not any(
        word in caught.value.message for word in ("pydantic", "Request:", "ChatMessage", "Traceback")
    )
    return caught.value


def refused(kind: type[Any] = ChatCompletionRequest, /, **fields: Any) -> ApiError:
    base = {"messages": MESSAGES} if kind is ChatCompletionRequest else {"prompt": "hi"}
    return refusal(json.dumps({"model": "m", **base, **fields}).encode(), kind)


def test_defaults() -> None:
    body = chat()
    assert (body.temperature, body.top_p, body.top_k, body.n, body.stream) == (1.0, 1.0, 0, 1, False)
    assert body.output_limit is None and body.seed is None and body.stop == []
    assert completion().output_limit == 16


def test_null_is_absent() -> None:
    fields = [
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "n",
        "stream",
        "stream_options",
        "max_tokens",
        "user",
    ]
    fields += [
        "service_tier",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "logprobs",
        *SAMPLING_FIELDS,
        *UNSUPPORTED,
    ]
    assert chat(**dict.fromkeys(fields)) == chat()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [2.1, -0.1, "0.5", True, [1], {}, 1e308]),
        ("top_p", [0, -0.1, 1.0001, "1", True]),
        ("top_k", [0.01, -2, 10**12, 5.0, "1", True]),
        ("seed", [2**64, -(2**63) - 1, 10**40, 1.5, "7", True]),
        ("max_tokens", [0, -1, 10**12, 1.0, "1", True]),
        ("max_completion_tokens", [0, -1, 2**31, 1.5]),
        ("n", [0, 9, 1.0, "1", True]),
        ("stream", [1, "true", 0]),
        ("ignore_eos", [1, "true"]),
        ("user", [1, {}]),
        ("service_tier", ["vip", 1]),
        ("stream_options", ["x", []]),
        ("model", [1, [], {}]),
        ("messages", [[], {}, "hi", 1]),
        ("top_logprobs", [0, 5, 21, -1]),
        ("logprobs", [1, 0, "x"]),
        ("echo", [True, 1, "x"]),
        ("min_p", [-0.1, 1.1, "0", True]),
        ("presence_penalty", [-2.1, 2.1, 1e308, "1", True]),
        ("frequency_penalty", [-2.1, 2.1, "1", True]),
        ("repetition_penalty", [0, 0.09, -1, 10.1, True]),
        ("min_tokens", [-1, 1.5, "1", 2**31, True]),
        ("stop_token_ids", [7, "1", {}, [1] * 65]),
        (
            "logit_bias",
            [[], 1, "x", {"abc": 1}, {"-1": 1}, {"01": 1}, {"1.0": 1}, {"": 1}, {"10000000000": 1}],
        ),
        ("logit_bias", [{str(i): 1 for i in range(1025)}]),
        ("tools", [[{"type": "function"}], {}, 1]),
        ("tool_choice", ["required", {"type": "function"}, 1]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[Any]) -> None:
    for value in values:
        assert refused(**{field: value}).param == field, value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 2, 0.5]),
        ("top_p", [1, 0.0001]),
        ("top_k", [-1, 0, 1]),
        ("seed", [-(2**63), 2**64 - 1, 0, -1]),
        ("n", [1, 8]),
        ("stop", ["a", [], ["a"] * 16]),
        ("service_tier", ["auto", "default", "flex", "priority"]),
        ("metadata", [{"a": "b"}]),
        ("some_field_of_next_year", [{"deep": [1]}]),
        ("response_format", [{"type": "text"}]),
        ("logit_bias", [{}, {"0": 100, "49151": -100.0}, {str(i): 0 for i in range(1024)}]),
        ("presence_penalty", [0, 0.0, 2, -2]),
        ("repetition_penalty", [1, 0.1, 10]),
        ("min_p", [0, 1, 0.05]),
        ("min_tokens", [0, 5]),
        ("stop_token_ids", [[], [0, 5]]),
        ("logprobs", [True, False]),
        ("echo", [False]),
        ("tools", [[]]),
        ("tool_choice", ["none", "auto"]),
    ],
)
def test_legal_values(field: str, values: list[Any]) -> None:
    for value in values:
        chat(**{field: value})


def test_tools_that_must_not_be_used_are_accepted() -> None:
    chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")


def test_stop_forms() -> None:
    assert chat(stop="a").stop == ["a"]
    assert refused(stop="").param == "stop[0]"
    assert refused(stop=["a", ""]).param == "stop[1]"
    assert refused(stop=["a"] * 17).param == "stop"
    assert refused(stop=["x" * 1001]).param == "stop[0]"
    assert refused(stop=["a", 1]).param == "stop[1]"
    assert refused(stop=1).param == "stop"


def test_stream_options_need_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert not chat(stream=True).include_usage
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    assert refused(stream=False, stream_options={"include_usage": False}).param == "stream_options"
    assert refused(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


def test_output_limit() -> None:
    assert chat(max_tokens=5).output_limit == 5
    assert chat(max_completion_tokens=6).output_limit == 6
    assert chat(max_tokens=6, max_completion_tokens=6).output_limit == 6
    assert refused(max_tokens=5, max_completion_tokens=6).param == "max_tokens"


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_known_but_unsupported_fields_say_so(field: str) -> None:
    for value in ("x", 7, True, False, [1], {"a": 1}):
        harmless = UNSUPPORTED[field][0]
        if any(type(value) is type(h) and value == h for h in harmless):
            chat(**{field: value})
        else:
            error = refused(**{field: value})
            assert error.param == field and "not" in error.message
    for value in UNSUPPORTED[field][0]:
        chat(**{field: value})


def test_a08_a_bad_bias_names_its_token() -> None:
    for value in (101, -101, 1e308, None, "1", True):
        assert refused(logit_bias={"5": 1, "7": value}).param == "logit_bias[7]"


def test_a_stop_token_that_is_none_is_named() -> None:
    for value in (-1, 1.5, "1", True, 2**31):
        assert refused(stop_token_ids=[1, value]).param == "stop_token_ids[1]"


def test_a07_log_probabilities() -> None:
    assert chat().likeliest is None
    assert chat(logprobs=True).likeliest == chat(logprobs=True, top_logprobs=0).likeliest == 0
    assert chat(logprobs=True, top_logprobs=20).likeliest == 20
    assert refused(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(logprobs=False, top_logprobs=2).param == "top_logprobs"
    assert completion().likeliest is None
    assert [completion(logprobs=count).likeliest for count in (0, 5)] == [0, 5]
    for value in (6, -1, True, "1"):
        assert refused(CompletionRequest, logprobs=value).param == "logprobs"


def test_completion_only_refusals() -> None:
    assert refused(CompletionRequest, max_tokens=0).param == "max_tokens"
    assert completion(max_tokens=0, echo=True).output_limit == 0
    assert refused(CompletionRequest, best_of=2).param == "best_of"
    assert completion(best_of=2, n=2).n == 2


# --- messages -------------------------------------------------------------------------------------------


def rendered(message: dict[str, Any]) -> dict[str, Any]:
    return chat(messages=[message]).template_messages()[0]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_and_parts_are_the_same(role: str) -> None:
    parts = [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}]
    assert rendered({"role": role, "content": parts}) == rendered({"role": role, "content": "a<|im_end|>b"})


def test_developer_is_system() -> None:
    assert rendered({"role": "developer", "content": "x"}) == {"role": "system", "content": "x"}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_an_assistant_message_with_tool_calls_needs_no_content(content: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = rendered({"role": "assistant", **content, "tool_calls": [call]})
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "arguments", ["not json", "[1]", "[" * 100_000, '{"a":' * 5000, "NaN", '{"a":1,"a":2}']
)
def test_tool_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = rendered({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "bot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
            "messages[0].tool_calls",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        ("text", "messages[0]"),
    ],
)
def test_bad_messages_name_the_place(message: Any, param: str) -> None:
    assert refused(messages=[message]).param == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_other_than_text_are_refused_by_name(kind: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "http://127.0.0.1/secret"}}]
    error = refused(messages=[*MESSAGES, {"role": "user", "content": parts}])
    assert error.param == "messages[1].content[1]"
    assert kind in error.message and "secret" not in error.message


def test_missing_fields() -> None:
    assert refusal(b'{"model": "m"}').param == "messages"
    assert refusal(b'{"messages": [{"role": "user", "content": "x"}]}').param == "model"
    assert refusal(b'{"model": "m"}', CompletionRequest).param == "prompt"


# --- prompts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([1, -1], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, True], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([[1, 2], [10**19]], "prompt[1][0]"),
        ([10**19], "prompt[0]"),
        (["a"] * 65, "prompt"),
        ({"a": 1}, "prompt"),
        (7, "prompt"),
        (None, "prompt"),
    ],
)
def test_bad_prompts_name_the_place(prompt: Any, param: str) -> None:
    assert refused(CompletionRequest, prompt=prompt).param == param


def test_many_token_ids_are_quick() -> None:
    raw = json.dumps({"model": "m", "prompt": [list(range(8192))] * 64}).encode()
    begin = time.perf_counter()
    parse_body(raw, CompletionRequest)
    assert time.perf_counter() - begin < 5


# --- bodies ---------------------------------------------------------------------------------------------

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], '


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400"])
@pytest.mark.parametrize("field", [b"temperature", b"top_p", b"min_p", b"presence_penalty", b"top_k"])
def test_numbers_that_are_none_name_their_field(literal: bytes, field: bytes) -> None:
    error = refusal(BODY + b'"%s": %s}' % (field, literal))
    assert error.param == field.decode()


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'"logit_bias": {"5": NaN}}', "logit_bias"),
        (b'"stop": ["a", [Infinity]]}', "stop"),
        (b'"user": "NaN", "te\\u006dperature": NaN}', "temperature"),
        (b'"user": "\\"top_p\\": NaN", "min_p": NaN}', "min_p"),
        (b'"seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'"user": "\\ud800"}', "user"),
        (b'"stop": ["a\\u0000b"]}', "stop"),
        (b'"model": "other"}', "model"),
        (b'"stream_options": {"x": 1, "x": 1}}', "stream_options"),
        (b'"tools": [{"function": {"parameters": {"a": 1, "a": 1}}}]}', "tools"),
        (b'"tools": ' + b'[{"a":' * 1000 + b"1" + b"}]" * 1000 + b"}", "tools"),
        (b'"metadata": {"seed": [1]}, "logit_bias": ' + b"[" * 100, "logit_bias"),
        (b'"stop": [' + b",".join([b"[]"] * 20_000) + b"]}", "stop"),
        (b'"unknown": {"seed": NaN}}', None),
        (b'"seed": NaN', None),
    ],
)
def test_F16_what_no_field_may_hold_names_its_field(raw: bytes, param: str | None) -> None:
    assert refusal(BODY + raw).param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"{'model': 1}",
        b'{"model": "m",}',
        b"\xef\xbb\xbf" + BODY[:-2] + b"}",
        "\ufeff{}".encode("utf-16"),
        b"\x00" + BODY[:-2] + b"}",
        BODY[:-2] + b"}\x00",
        BODY[:-2] + b"} {}",
        BODY + b'"user": "\xff"}',
        BODY + b'"user": "\xed\xa0\x80"}',
        BODY + b'"user": "\\ud800"}',
        BODY + b'"user": "\\udc00\\ud800"}',
        BODY + b'"\\ud800": 1}',
        BODY + b'"user": "a\\u0000b"}',
        BODY + b'"user": "a\x00b"}',
        BODY + b'"x": NaN}',
        BODY + b'"x": {"a": 1, "a": 2}}',
        BODY + b'"model": "other"}',
        BODY + b'"seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_not_acceptable_json(raw: bytes) -> None:
    error = refusal(raw)
    assert len(error.message) < 200


def test_escapes_that_are_fine() -> None:
    raw = BODY[:-2].replace(b"hi", b'\\ud83d\\udc4d \\\\u0000 \\\\ud800 {[\\"[{') + b"}"
    assert parse_body(raw, ChatCompletionRequest).messages[0].content == '👍 \\u0000 \\ud800 {["[{'


HOSTILE = {
    "arrays": BODY + b'"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "unclosed arrays": BODY + b'"x": ' + b"[" * 1_000_000,
    "objects": BODY + b'"x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "mixed": BODY + b'"x": ' + b'[{"a":' * 5_000 + b"1" + b"}]" * 5_000 + b"}",
    "depth 100": BODY + b'"x": ' + b"[" * 100 + b"]" * 100 + b"}",
    "tools": BODY + b'"tools": [{"parameters": ' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}]}",
    "members": BODY + b",".join(b'"k%d": 1' % i for i in range(1_000_000)) + b"}",
    "containers": BODY + b'"x": [' + b",".join([b"[]"] * 500_000) + b"]}",
    "escaped quotes": BODY + b'"x": "' + b'\\"[{:' * 500_000,
    "quotes": BODY + b'"' * 1_000_001 + b"[" * 100,
    "an open string of quotes": BODY + b'"x": "' + b'\\"' * 200_000 + b"[" * 100,
    "integers": BODY + b'"x": [' + b"1," * 1_000_000 + b"NaN]}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_quickly(name: str) -> None:
    begin = time.perf_counter()
    error = refusal(HOSTILE[name])
    assert time.perf_counter() - begin < 3  # a quadratic scan takes minutes
    assert len(error.message) < 200


def test_brackets_inside_of_strings_do_not_count() -> None:
    text = '[[{{"\\' * 2000
    body = parse_body(
        json.dumps({"model": "m", "messages": MESSAGES, "user": text}).encode(), ChatCompletionRequest
    )
    assert body.user == text


def test_depth_at_the_limit() -> None:
    for depth, legal in ((63, True), (64, False)):
        raw = BODY + b'"x": ' + b"[" * depth + b"]" * depth + b"}"
        if legal:
            parse_body(raw, ChatCompletionRequest)
        else:
            assert "deeper" in refusal(raw).message


def test_identity_and_addresses_in_a_body_mean_nothing() -> None:
    assert chat(api_base="http://127.0.0.1", tenant="beta", user="beta") == chat(user="beta")
