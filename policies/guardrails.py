"""Protection lines of a pool: what is measured against them, and what is given up step by step when one is crossed.

First batch work is shed, then long contexts, then the pool is run with fewer sequences and fewer prompt tokens at once
(the order of Stripe's load shedders: what matters least goes first). It steps back in the same order, with hysteresis.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from policies.admission import LONG_CONTEXT_STEPS
from policies.tickets import EngineReport, Grant, Refusal, Ticket

WINDOW_SECONDS = 15.0
STEP_SECONDS = 3.0
"""A further step down is taken no sooner: the one before must have had time to show."""

CLEAR_SECONDS = 10.0
CLEAR_SHARE = 0.8
"""All measures must have been below this share of their lines for so long before a step back."""

SHED_BATCH, SHED_LONG_CONTEXT, SMALLER_BATCH = 1, 2, 3
MOST_STEPS = 6
_BATCH_FACTOR = 0.75  # per step beyond shedding: 0.75, 0.56, 0.42, 0.32
RETRY_AFTER_MS = 2000.0
_REMEMBERED = 10_000
_FEWEST = 20  # values from which a percentile means anything


@dataclass(frozen=True)
class ProtectionLines:
    """Upper limits for a pool; None is no line. Rates and shares are 0 to 1."""

    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    queue_wait_p95_ms: float | None = None
    kv_cache_utilization_max: float | None = None
    admission_reject_rate_max: float | None = None


class _Window:
    """Values of the last WINDOW_SECONDS."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=2000)

    def add(self, value: float, now: float) -> None:
        self._values.append((now, value))

    def clear(self) -> None:
        self._values.clear()

    def values(self, now: float) -> list[float]:
        while self._values and self._values[0][0] < now - WINDOW_SECONDS:
            self._values.popleft()
        return [value for _, value in self._values]

    def p95(self, now: float) -> float | None:
        """Nearest rank; None with too few values."""
        values = sorted(self.values(now))
        return values[math.ceil(0.95 * len(values)) - 1] if len(values) >= _FEWEST else None

    def mean(self, now: float) -> float | None:
        values = self.values(now)
        return sum(values) / len(values) if len(values) >= _FEWEST else None


class Guardrails:
    """Tell it what happens, ask it what to give up. `step` 0: all is well. Times in s, `now` of one monotonic clock."""

    def __init__(self) -> None:
        self.lines = ProtectionLines()
        self.step = 0
        self.crossed: str | None = None
        """The line that led to the last step down."""
        self._ttft, self._wait, self._gaps, self._refused = (_Window() for _ in range(4))
        self._utilization: dict[str, float] = {}
        self._granted: OrderedDict[str, float] = OrderedDict()  # when the ticket came, by request
        self._step_tokens = 0
        self._last_change = -math.inf
        self._clear_since: float | None = None

    def shed(self, ticket: Ticket) -> Refusal | None:
        """Refuse a new ticket that is given up at this step, with code "overloaded"."""
        long_context = ticket.input_tokens >= LONG_CONTEXT_STEPS * self._step_tokens
        if self.step >= SHED_BATCH and ticket.service_class == "batch":
            what = "batch requests"
        elif self.step >= SHED_LONG_CONTEXT and self._step_tokens and long_context:
            what = "long prompts"
        else:
            return None
        message = f"the service is near its limits ({self.crossed}) and takes no {what} just now"
        return Refusal(ticket.request, ticket.attempt, "overloaded", message, RETRY_AFTER_MS)

    def observe_offer(self, refused: bool, now: float) -> None:
        """A new ticket was queued or refused. What `shed` refuses does not count."""
        self._refused.add(float(refused), now)

    def observe_grant(self, grant: Grant, now: float) -> None:
        self._wait.add(grant.queued_ms, now)
        self._granted[grant.request] = now - grant.queued_ms / 1e3
        if len(self._granted) > _REMEMBERED:
            self._granted.popitem(last=False)

    def observe_report(self, report: EngineReport, now: float) -> EngineReport:
        """Take an engine's state; the same report with the limits of this step, never above the engine's own."""
        self._utilization[report.engine] = 1.0 - report.free_pages / max(report.total_pages, 1)
        self._step_tokens = report.max_num_batched_tokens
        if report.decode_step_seconds is not None:
            self._gaps.add(report.decode_step_seconds * 1e3, now)
        for request, _ in report.first_tokens:
            came = self._granted.pop(request, None)
            if came is not None:
                self._ttft.add((now - came) * 1e3, now)
        factor = _BATCH_FACTOR ** max(0, self.step - SMALLER_BATCH + 1)
        if factor == 1.0:
            return report
        return replace(
            report,
            max_num_seqs=max(1, int(factor * report.max_num_seqs)),
            max_num_batched_tokens=max(1, int(factor * report.max_num_batched_tokens)),
        )

    def forget_engine(self, name: str) -> None:
        self._utilization.pop(name, None)

    def evaluate(self, now: float) -> int:
        """Compare with the lines and step down or back. Call it about once a second; answers the step."""
        ratios = dict(self._ratios(now))
        worst = max(ratios, key=lambda name: ratios[name], default=None)
        if worst is not None and ratios[worst] > 1.0:
            self._clear_since = None
            if now - self._last_change >= STEP_SECONDS and self.step < MOST_STEPS:
                self.crossed = worst
                self._move(1, now)
        elif worst is not None and ratios[worst] > CLEAR_SHARE:
            self._clear_since = None
        else:
            self._clear_since = now if self._clear_since is None else self._clear_since
            if self.step and now - max(self._clear_since, self._last_change) >= CLEAR_SECONDS:
                self._move(-1, now)
        return self.step

    def _move(self, by: int, now: float) -> None:
        self.step, self._last_change = self.step + by, now
        for window in (self._ttft, self._wait, self._gaps, self._refused):
            window.clear()  # the next step rests on what this one leads to

    def _ratios(self, now: float) -> Iterable[tuple[str, float]]:
        """How near each line with a measure is; above 1 it is crossed."""
        measures: dict[str, Callable[[], float | None]] = {
            "ttft_p95_ms": lambda: self._ttft.p95(now),
            "itl_p95_ms": lambda: self._gaps.p95(now),
            "queue_wait_p95_ms": lambda: self._wait.p95(now),
            "kv_cache_utilization_max": lambda: max(self._utilization.values(), default=None),
            "admission_reject_rate_max": lambda: self._refused.mean(now),
        }
        for name, measure in measures.items():
            line = getattr(self.lines, name)
            if line is not None and (value := measure()) is not None:
                yield name, value / line
