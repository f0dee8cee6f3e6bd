"""Grants on their way: given, and confirmed by no report yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from policies.tickets import Ticket


class GrantInFlight(NamedTuple):
    """`cost` is what was booked, `reclaims` whether the engine has to make room by preemption."""

    ticket: Ticket
    engine: str
    cost: float
    expires_at: float
    reclaims: bool


class GrantsInFlight:
    """By request, oldest first. All grants live equally long, so the oldest expires first."""

    def __init__(self) -> None:
        self._grants: dict[str, GrantInFlight] = {}

    def get(self, request: str) -> GrantInFlight | None:
        return self._grants.get(request)

    def add(self, grant: GrantInFlight) -> None:
        self._grants[grant.ticket.request] = grant

    def pop(self, request: str) -> GrantInFlight | None:
        return self._grants.pop(request, None)

    def of_engine(self, engine: str) -> list[str]:
        """Requests on their way to one engine."""
        return [request for request, grant in self._grants.items() if grant.engine == engine]

    def expired(self, now: float) -> Iterator[str]:
        """Requests whose grant is void. Each must be popped before the next is asked for."""
        while self._grants:
            request, grant = next(iter(self._grants.items()))
            if grant.expires_at > now:
                return
            yield request
