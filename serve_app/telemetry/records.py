"""What is known of one HTTP request: filled in by the gateway on its way, read once after its end.

Times are milliseconds on the gateway's monotonic clock since the request arrived at our HTTP edge; None means
the phase was never reached. The wall clock is read once, at arrival, and places the request in a trace.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from engine_actor.request import RequestTimings, RequestUsage
from engine_actor.stats import Histogram
from serve_app.api.responses import Usage

Outcome = Literal["ok", "cancelled", "error", "refused"]
"""refused: turned away before an engine took it. error: taken and not kept. cancelled: left by the client."""

INTER_TOKEN_BOUNDS_S = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


@dataclass(frozen=True)
class TraceContext:
    """Identity of a request's root span, fixed at arrival so that it can be sent on before the request ends.

    `parent_span_id` is the caller's span, None when we began the trace. `flags` are the W3C trace flags (bit
    0 sampled, bit 1 random trace id). `trace_state` is the caller's tracestate, validated and in header form.
    """

    trace_id: int
    span_id: int
    parent_span_id: int | None = None
    flags: int = 0
    trace_state: str = ""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & 1)


@dataclass(frozen=True)
class EngineTimings:
    """Timings of one sequence as its engine reported them.

    `wall_time_ns` is the engine's wall clock in the message that carried them, `timings.finished_ms` after
    acceptance.
    """

    wall_time_ns: int
    timings: RequestTimings
    sequence: int = 0


@dataclass
class RequestRecord:
    """One request, all its sequences (n times the number of prompts) together.

    `tenant` is set from the API key alone, so it is None until the key was accepted. `route` is the matched
    route ("/v1/chat/completions"), never the raw path. `model` and `request` may come from the client:
    readers bound them. `usage` counts what was computed, also for a request that was cancelled.
    `enqueued_ms`, `granted_ms` and `submitted_ms` are those of the last attempt.
    """

    request: str
    route: str
    method: str = "POST"
    started_wall_ns: int = field(default_factory=time.time_ns)
    started_monotonic_ns: int = field(default_factory=time.monotonic_ns)
    trace: TraceContext | None = None

    tenant: str | None = None
    key_fingerprint: str | None = None
    model: str | None = None
    stream: bool = False
    sequences: int = 1

    authenticated_ms: float | None = None
    validated_ms: float | None = None
    reserved_ms: float | None = None
    enqueued_ms: float | None = None
    granted_ms: float | None = None
    submitted_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    finished_ms: float | None = None

    attempts: int = 0
    engine: str | None = None
    engine_timings: list[EngineTimings] = field(default_factory=list)
    usage: RequestUsage = field(default_factory=RequestUsage)
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS_S))
    """Gaps between tokens of the same sequence, in seconds."""
    billed: Usage | None = None
    """What the tenant is charged for: each prompt once, however many answers it has."""

    ttft_target_ms: float | None = None
    deadline_ms: float | None = None
    admission: Literal["admitted", "demoted"] | None = None
    predicted_first_token_ms: float | None = None
    """The client's deadlines for the first and the last token, whether they were promised, and the prediction then."""

    outcome: Outcome | None = None
    status: int | None = None
    error_code: str | None = None
    finish_reasons: list[str] = field(default_factory=list)

    _last_sent_ms: dict[int, float] = field(default_factory=dict, repr=False)

    def now_ms(self) -> float:
        """Milliseconds since arrival."""
        return (time.monotonic_ns() - self.started_monotonic_ns) / 1e6

    def new_attempt(self, at_ms: float) -> None:
        """The request enters the fair queue, for the first time or again after an engine was lost.

        It runs again only while nothing was sent, so tokens of a lost run never were the client's.
        """
        self.attempts += 1
        self.enqueued_ms = at_ms
        self.granted_ms = self.submitted_ms = self.engine = None
        self.engine_timings = []
        self.first_token_ms = self.last_token_ms = None
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self._last_sent_ms = {}

    def token_sent(self, at_ms: float, sequence: int = 0) -> None:
        """New tokens of one sequence went out at `at_ms` (without streaming: they reached the gateway).

        Call once per message that carries tokens: a gap is what the reader of the stream saw, so several
        tokens in one message make one gap, and a one-token answer makes none.
        """
        if self.first_token_ms is None:
            self.first_token_ms = at_ms
        previous = self._last_sent_ms.get(sequence)
        if previous is not None:
            self.inter_token.observe((at_ms - previous) / 1000.0)
        self._last_sent_ms[sequence] = at_ms
        self.last_token_ms = at_ms

    def finish(self, outcome: Outcome, status: int, error_code: str | None = None) -> None:
        """State how the request ended. `status` is 499 where the client left before a status line."""
        self.outcome = outcome
        self.status = status
        self.error_code = error_code
        self.finished_ms = self.now_ms()

    @property
    def deadline_met(self) -> bool | None:
        """Whether every deadline of the client was met, promised or not; None where there was none."""
        if self.ttft_target_ms is None and self.deadline_ms is None:
            return None
        first, end = self.first_token_ms, self.finished_ms
        in_time = self.ttft_target_ms is None or (first is not None and first <= self.ttft_target_ms)
        if self.deadline_ms is not None:
            in_time = in_time and self.outcome == "ok" and end is not None and end <= self.deadline_ms
        return in_time

    @property
    def queue_ms(self) -> float | None:
        """Time in the fair queue: until the grant, or until the request left without one."""
        if self.enqueued_ms is None:
            return None
        left = self.granted_ms if self.granted_ms is not None else self.finished_ms
        return None if left is None else max(0.0, left - self.enqueued_ms)

    def stages_ms(self) -> dict[str, float | None]:
        """How long each stage up to the engine took, and the engine's own time to the first token.

        None for a stage that was not reached. Between stages nothing happens but waiting for this process.
        """
        marks = {
            "auth": (0.0, self.authenticated_ms),
            "tokenise": (self.authenticated_ms, self.validated_ms),
            "reserve": (self.validated_ms, self.reserved_ms),
            "queue": (self.enqueued_ms, self.granted_ms),
            "submit": (self.granted_ms, self.submitted_ms),
        }
        stages = {
            name: None if begin is None or end is None else end - begin
            for name, (begin, end) in marks.items()
        }
        first = [
            t.timings.first_token_ms for t in self.engine_timings if t.timings.first_token_ms is not None
        ]
        return {**stages, "engine": min(first, default=None)}

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Mean gap after the first token, of a mean sequence; None if none can have had a second token."""
        per_sequence = self.usage.output / max(1, self.sequences)
        if self.first_token_ms is None or self.last_token_ms is None or per_sequence <= 1:
            return None
        return (self.last_token_ms - self.first_token_ms) / (per_sequence - 1)

    @property
    def phase(self) -> Literal["edge", "queue", "prefill", "decode"]:
        """How far the request came."""
        if self.first_token_ms is not None:
            return "decode"
        if self.submitted_ms is not None:
            return "prefill"
        return "edge" if self.enqueued_ms is None else "queue"


def bounded(text: str, limit: int = 128) -> str:
    """A client's text made safe to store: printable characters only, at most `limit` of them."""
    return "".join(char if char.isprintable() else "?" for char in text[:limit])
