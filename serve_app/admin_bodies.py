"""What the admin API is sent: bodies, read with limits of their own and checked."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from serve_app.api import errors
from serve_app.api.errors import invalid_request
from serve_app.api.json_body import JsonError, load_json
from serve_app.config_errors import describe
from tenancy.models import Limits

_M = TypeVar("_M", bound=BaseModel)

MAX_BODY_BYTES = 256 * 1024
MAX_OVERLAP_S = 90 * 86_400
MAX_EXPIRES_IN_S = 100 * 366 * 86_400


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class KeyRequest(_Body):
    """What may be said about a key. `expires_in_s` counts from now."""

    name: Annotated[str, Field(max_length=200)] | None = None
    models: list[str] | None = None
    routes: list[str] | None = None
    limits: Limits | None = None
    expires_in_s: Annotated[int, Field(ge=1, le=MAX_EXPIRES_IN_S)] | None = None


class RotateRequest(_Body):
    """For how long the old key stays valid beside the new one."""

    overlap_s: Annotated[int, Field(ge=0, le=MAX_OVERLAP_S)] = 86_400


async def read_json(request: Request) -> dict[str, Any]:
    """The body, a JSON object; an empty one is empty. Raises ApiError 400, 413."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise errors.request_too_large(MAX_BODY_BYTES)
    try:
        data = load_json(body or b"{}")
    except JsonError as error:
        raise invalid_request(str(error), error.key) from None
    if not isinstance(data, dict):
        raise invalid_request("The request body must be a JSON object.")
    return data


def parsed(model: type[_M], data: dict[str, Any]) -> _M:
    """`data` as `model`. Raises ApiError 400 with the name of the field that is wrong."""
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors(include_url=False)[0]["loc"])
        raise invalid_request(f"{describe(error, model, data)}.", field or None) from None
