"""Trace files: CSV with a header, or JSON lines in the format of the Mooncake traces or with the CSV's names."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from benchmarks.simulate.cost_models import DATA as DATA
from benchmarks.simulate.requests import SimulatedRequest
from benchmarks.workload import BenchmarkError
from policies.tickets import ServiceClass
from serve_app.config_errors import describe

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TraceRow(BaseModel):
    """One request. Times are in milliseconds; `hash_ids` names 512-token blocks of the prompt, equal ids equal text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arrival_ms: float = Field(
        ge=0, allow_inf_nan=False, validation_alias=AliasChoices("arrival_ms", "timestamp")
    )
    input_tokens: int = Field(ge=1, validation_alias=AliasChoices("input_tokens", "input_length"))
    output_tokens: int = Field(ge=1, validation_alias=AliasChoices("output_tokens", "output_length"))
    tenant: str = Field("tenant", min_length=1, validation_alias=AliasChoices("tenant", "client"))
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    service_class: ServiceClass = "default"
    slo_ttft_ms: _Seconds | None = None
    slo_tpot_ms: _Seconds | None = None
    slo_deadline_ms: _Seconds | None = None
    cancel_after_ms: _Seconds | None = None
    kv_share: float = Field(1.0, gt=0, le=1)
    hash_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 21)], ...] = ()

    def request(self) -> SimulatedRequest:
        return SimulatedRequest(
            arrival_s=self.arrival_ms / 1e3,
            tenant=self.tenant,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            weight=self.weight,
            service_class=self.service_class,
            slo_ttft_s=_seconds(self.slo_ttft_ms),
            slo_tpot_s=_seconds(self.slo_tpot_ms),
            slo_deadline_s=_seconds(self.slo_deadline_ms),
            cancel_after_s=_seconds(self.cancel_after_ms),
            prefix_blocks=self.hash_ids,
            kv_share=self.kv_share,
        )


def read_trace(path: Path) -> list[SimulatedRequest]:
    """The requests of a trace file. Raises BenchmarkError for the first mistake, with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path}: cannot be read: {error}") from None
    rows = _json_rows(path, text) if path.suffix == ".jsonl" else _csv_rows(text)
    requests = []
    for line, data in rows:
        try:
            requests.append(TraceRow.model_validate(data).request())
        except ValidationError as error:
            raise BenchmarkError(f"{path}:{line}: {describe(error, TraceRow, data)}") from None
    if not requests:
        raise BenchmarkError(f"{path}: holds no requests")
    return requests


def _csv_rows(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        yield reader.line_num, {name: value for name, value in row.items() if value not in ("", None)}


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, source in enumerate(text.splitlines(), start=1):
        if not source.strip():
            continue
        try:
            data = json.loads(source)
        except ValueError as error:
            raise BenchmarkError(f"{path}:{line}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise BenchmarkError(f"{path}:{line}: a JSON object is expected")
        yield line, data


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
