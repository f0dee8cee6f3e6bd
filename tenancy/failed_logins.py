"""How often logins from one source may fail: counted in memory, bounded whatever is sent."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable

WINDOW_S = 60.0
MAX_FAILURES, MAX_KNOWN = 50_000, 10_000


class FailedLogins:
    """Failures of the last minute by source, and which tenants have logged in from where.

    A source that has failed too often waits, except for tenants that it has logged in before: whoever sends wrong keys
    from behind a shared address locks out nobody who works from there. What is remembered is bounded by MAX_FAILURES
    times and MAX_KNOWN pairs; the sources that failed longest ago, and the pairs used longest ago, are forgotten first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._total = 0
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wait_s(self, source: str, tenant: str | None, limit: int) -> float:
        """Seconds until a login from `source` is looked at again; 0 for one that may be now. `tenant` is whose valid
        key it is, None for a wrong one."""
        times = self._recent(source)
        if len(times) < limit or (tenant is not None and (source, tenant) in self._known):
            return 0.0
        return max(times[len(times) - limit] + WINDOW_S - self._clock(), 0.001)

    def failed(self, source: str) -> int:
        """A login failed. Returns how many of this source have within a minute."""
        times = self._failures.setdefault(source, deque())
        times.append(self._clock())
        self._failures.move_to_end(source)
        self._total += 1
        while self._total > MAX_FAILURES:
            _, forgotten = self._failures.popitem(last=False)
            self._total -= len(forgotten)
        return len(self._recent(source))

    def accepted(self, source: str, tenant: str) -> None:
        """A tenant logged in."""
        self._known[source, tenant] = None
        self._known.move_to_end((source, tenant))
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _recent(self, source: str) -> deque[float]:
        times = self._failures.get(source)
        if times is None:
            return deque()
        since = self._clock() - WINDOW_S
        while times and times[0] <= since:
            times.popleft()
            self._total -= 1
        if not times:
            del self._failures[source]
        return times
