"""The OpenAPI 3.1 description of the HTTP API, from the models that check requests.

Request schemas say what is accepted where JSON Schema can say it; rules between fields are in the prose of the docs.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.api.errors import known_codes
from serve_app.api.schemas import ChatCompletionRequest, CompletionRequest
from serve_app.api.tokens import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REFUSALS = (400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 500, 503, 504)


def openapi_document(version: str) -> dict[str, Any]:
    """The document that GET /openapi.json answers with."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _BODIES.values()], ref_template=_REF, by_alias=True
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Evenhand", "version": version, "license": {"name": "Apache-2.0"}},
        "security": [{"key": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas["$defs"], **_answers()},
        },
    }


def _paths() -> dict[str, Any]:
    model = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    return {
        "/v1/chat/completions": _post(
            "/v1/chat/completions", "ChatCompletion", "Answer a conversation", True
        ),
        "/v1/completions": _post("/v1/completions", "Completion", "Continue one text or several", True),
        "/tokenize": _post("/tokenize", "Tokens", "The tokens of a text or a conversation"),
        "/detokenize": _post("/detokenize", "Text", "The text of some tokens"),
        "/v1/models": _get("ModelList", "The models this key may use"),
        "/v1/models/{model}": _get("Model", "One of them", parameters=[model]),
        "/v1/usage": _get("Usage", "What this tenant has used, by UTC day and model"),
        "/health": _get("Status", "An engine can serve now", key=False, also=(503,)),
        "/ready": _get("Status", "The same as /health", key=False, also=(503,)),
        "/live": _get("Status", "The process answers", key=False),
        "/version": _get("Version", "The version of the server", key=False),
    }


def _post(path: str, answer: str, summary: str, generates: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    headers = []
    if generates:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "With stream: true"}}
        headers = [
            {
                "name": name,
                "in": "header",
                "schema": {"type": "string", "maxLength": limit},
                "description": text,
            }
            for name, limit, text in (
                (
                    "Idempotency-Key",
                    255,
                    "The same key and body get the same answer, charged once. No streams.",
                ),
                ("X-Request-Id", 128, "Comes back with the answer, and is in the access log"),
            )
        ]
    body = {"required": True, "content": {"application/json": {"schema": _ref(_BODIES[path].__name__)}}}
    return {
        "post": {
            "summary": summary,
            "parameters": headers,
            "requestBody": body,
            "responses": {"200": {"description": "The answer", "content": content}, **_errors(_REFUSALS)},
        }
    }


def _get(
    answer: str,
    summary: str,
    *,
    key: bool = True,
    parameters: list[dict[str, Any]] | None = None,
    also: tuple[int, ...] = (),
) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(answer)}}
    responses = {str(status): {"description": summary, "content": content} for status in (200, *also)}
    refusals = (401, 403, 404, 405) if key else (405,)
    operation: dict[str, Any] = {"summary": summary, "responses": {**responses, **_errors(refusals)}}
    if parameters:
        operation["parameters"] = parameters
    if not key:
        operation["security"] = []
    return {"get": operation}


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("Error")}}
    return {str(status): {"description": "Refused", "content": content} for status in statuses}


def _answers() -> dict[str, Any]:
    usage = _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    )
    ended = {"enum": ["stop", "length"]}
    message = _object(role={"const": "assistant"}, content=_TEXT, refusal={"type": "null"})
    common = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "usage": usage}
    error = _object(
        message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"enum": sorted(known_codes())}
    )
    model = _object(
        id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len={"type": "integer"}
    )
    used = _object(
        date={"type": "string", "format": "date"},
        model=_TEXT,
        requests=_COUNT,
        input_tokens=_COUNT,
        cached_tokens=_COUNT,
        output_tokens=_COUNT,
        cost={"type": "number"},
    )
    return {
        "Error": _object(error=error),
        "ChatCompletion": _object(
            object={"const": "chat.completion"},
            choices=_list(_object(index=_COUNT, message=message, finish_reason=ended)),
            **common,
        ),
        "Completion": _object(
            object={"const": "text_completion"},
            choices=_list(_object(index=_COUNT, text=_TEXT, finish_reason=ended)),
            **common,
        ),
        "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
        "Text": _object(prompt=_TEXT),
        "Model": model,
        "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
        "Usage": _object(object={"const": "list"}, data=_list(used)),
        "Status": _object(status={"enum": ["ok", "unavailable"]}),
        "Version": _object(version=_TEXT),
    }


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(model: str) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model)}
