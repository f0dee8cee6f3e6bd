"""The body of a request: JSON as strict as it gets, checked against a model, and one clear error for a mistake."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from serve_app.api.errors import ApiError, invalid_request
from serve_app.api.json_body import JsonError, load_json
from serve_app.api.unsupported import REFUSED_FIELDS

Model = TypeVar("Model", bound=BaseModel)


class Body(BaseModel):
    """A JSON object of a request: strict types, null means absent, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return (
            {key: value for key, value in data.items() if value is not None}
            if isinstance(data, dict)
            else data
        )


def parse_body(raw: bytes, model: type[Model]) -> Model:
    """Read and check a request body. Raises ApiError 400 `invalid_request`, with the field in `param`."""
    try:
        body = load_json(raw)
    except JsonError as error:
        fields = {field.alias or name for name, field in model.model_fields.items()}
        known = error.key in fields or error.key in REFUSED_FIELDS
        raise invalid_request(str(error), error.key if known else None) from None
    if not isinstance(body, dict):
        raise invalid_request("The request body must be a JSON object.")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(error) from None


def _as_api_error(error: ValidationError) -> ApiError:
    detail = error.errors(include_url=False, include_input=False)[0]
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    if detail["type"] == "refused":
        at = detail["ctx"]["at"]
        path += at if at.startswith("[") or not path or not at else f".{at}"
        message = detail["ctx"]["message"]
    else:
        message = _MESSAGES.get(detail["type"], "has a value that is not allowed")
        message = message.format(**{name: _bound(value) for name, value in detail.get("ctx", {}).items()})
    return invalid_request(f"{path}: {message}.", path or None)


# What is said of each kind of mistake that pydantic finds; the names are those of its error contexts.
_MESSAGES = {
    "missing": "is required",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be an integer of ordinary size",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must hold at least {min_length} item(s)",
    "too_long": "must hold at most {max_length} items",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
}


def _bound(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
