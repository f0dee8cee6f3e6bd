"""What a gateway admits by itself while Redis does not answer, by the policy each limit declares."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from tenancy.limits import Check

_MINUTE_S = 60.0


class Outage:
    """The local side of the limits: `closed` refuses, `open` admits, `local_share` admits limit / gateways.

    Shares are rounded down, so that all gateways together stay within the limit; where their number was
    never learnt, a share is nothing. What Redis admitted in the minute before the outage is not known here:
    in a window that spans its beginning up to twice the limit may pass, however many gateways there are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.gateways: int | None = None
        self.admitted = 0
        self._logs: dict[str, deque[tuple[float, int]]] = {}
        self._slots: dict[str, int] = {}

    def admit(self, tenant: str, checks: Sequence[Check], amounts: Sequence[int]) -> tuple[int, float] | None:
        """Take from every limit or from none.

        Returns None if admitted, else the index of the limit that refuses and the seconds until it may not
        (-1: unknown, for as long as the outage lasts).
        """
        now = self._clock()
        shared = []
        for index, (check, amount) in enumerate(zip(checks, amounts, strict=True)):
            if check.outage == "open":
                continue
            share = 0
            if check.outage == "local_share" and self.gateways is not None:
                share = check.limit // self.gateways
            name = f"{tenant}/{check.field}"
            if check.kind == "c":
                if self._slots.get(name, 0) + amount > share:
                    return index, 1.0 if amount <= share else -1.0
            else:
                wait = self._wait(name, amount, share, now)
                if wait:
                    return index, wait
            shared.append((name, check, amount))
        for name, check, amount in shared:
            if check.kind == "c":
                self._slots[name] = self._slots.get(name, 0) + amount
            else:
                self._logs.setdefault(name, deque()).append((now, amount))
        self.admitted += 1
        return None

    def release(self, tenant: str, checks: Sequence[Check], amounts: Sequence[int]) -> None:
        """A request admitted here has ended: its slots are free."""
        for check, amount in zip(checks, amounts, strict=True):
            name = f"{tenant}/{check.field}"
            if check.kind == "c" and name in self._slots:
                self._slots[name] -= amount
                if self._slots[name] <= 0:
                    del self._slots[name]

    def _wait(self, name: str, amount: int, share: int, now: float) -> float:
        if amount > share:
            return -1.0
        log = self._logs.get(name, deque())
        while log and log[0][0] <= now - _MINUTE_S:
            log.popleft()
        over = sum(taken for _, taken in log) + amount - share
        for at, taken in log:
            if over <= 0:
                break
            over -= taken
            if over <= 0:
                return max(at + _MINUTE_S - now, 0.001)
        return 0.0
