"""Workload files: JSON lines, one request each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_app.config_errors import describe
from serve_app.text.tokenizer import Tokenizer


class BenchmarkError(ValueError):
    """The benchmark cannot be run as asked. The message is one line, ready for the user."""


class WorkloadRow(BaseModel):
    """One request: a prompt as plain text or as token ids, and how many tokens to generate.

    `arrival_s` counts seconds from the start of the run. Requests of one `group` are summed up together in
    the report; `tenant` is who the scheduler thinks is asking.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: Annotated[str, Field(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    arrival_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 0.0
    group: Annotated[str, Field(min_length=1)] | None = None
    tenant: Annotated[str, Field(min_length=1)] = "benchmark"

    @model_validator(mode="after")
    def _one_prompt(self) -> WorkloadRow:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give exactly one of prompt and prompt_token_ids")
        return self


@dataclass(frozen=True)
class BenchmarkRequest:
    """A row ready to run. `where` is FILE:LINE, for messages."""

    where: str
    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float = 0.0
    group: str | None = None
    tenant: str = "benchmark"


def read_workload(path: Path) -> list[tuple[str, WorkloadRow]]:
    """(FILE:LINE, row) of every line that is not empty. Raises BenchmarkError for the first mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BenchmarkError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path}: cannot be read: {error}") from None
    rows: list[tuple[str, WorkloadRow]] = []
    # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise BenchmarkError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise BenchmarkError(f"{where}: a JSON object is expected")
        try:
            rows.append((where, WorkloadRow.model_validate(data)))
        except ValidationError as error:
            raise BenchmarkError(f"{where}: {describe(error, WorkloadRow, data)}") from None
    if not rows:
        raise BenchmarkError(f"{path}: holds no requests")
    return rows


def tokenise(rows: list[tuple[str, WorkloadRow]], tokenizer: Tokenizer) -> list[BenchmarkRequest]:
    """Rows with their prompts as token ids: text is plain text, without chat template or BOS."""
    return [
        BenchmarkRequest(
            where=where,
            prompt_token_ids=row.prompt_token_ids or tokenizer.encode_text(row.prompt or ""),
            max_tokens=row.max_tokens,
            arrival_s=row.arrival_s,
            group=row.group,
            tenant=row.tenant,
        )
        for where, row in rows
    ]


def check_fits(requests: list[BenchmarkRequest], model_length: int, vocab_size: int) -> None:
    """Refuse what the engine would cut short or cannot compute: BenchmarkError names line and field."""
    for request in requests:
        prompt = request.prompt_token_ids
        if not prompt:
            raise BenchmarkError(f"{request.where}: prompt: the tokenizer makes no token of it")
        if (highest := max(prompt)) >= vocab_size:
            raise BenchmarkError(
                f"{request.where}: prompt_token_ids: {highest} is not allowed; allowed: 0 to {vocab_size - 1}"
            )
        if len(prompt) + request.max_tokens > model_length:
            raise BenchmarkError(
                f"{request.where}: max_tokens: {len(prompt)} prompt tokens and {request.max_tokens} more "
                f"do not fit the context of {model_length} tokens"
            )


def other_prompts(requests: list[BenchmarkRequest], vocab_size: int) -> list[BenchmarkRequest]:
    """The warm-up: as many prompts as long, every token another one, all at once, a quarter of the output.

    A quarter keeps the proportions: as in the real run, the batch passes through every size on its way out.
    """
    return [
        BenchmarkRequest(
            where=request.where,
            prompt_token_ids=[(token + vocab_size // 2) % vocab_size for token in request.prompt_token_ids],
            max_tokens=-(-request.max_tokens // 4),
            tenant=request.tenant,
        )
        for request in requests
    ]
