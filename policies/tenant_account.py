"""What the fair queue knows of a tenant: its service, and its tickets that wait."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.tickets import Ticket

MAIN_LANE = "main"
"""The lane of every ticket in an order that knows no classes."""


class QueuedTicket(NamedTuple):
    """A waiting ticket. Sorts by rank, then by `order`, which is unique: tickets are never compared.

    `rank` is its place among the tenant's own in one lane, `arrival` the monotonic time in seconds from which its
    age counts, `cost` its priced work when nothing of it is cached.
    """

    rank: float
    order: int
    arrival: float
    lane: str
    cost: float
    ticket: Ticket


@dataclass(eq=False)
class TenantAccount:
    """One tenant. Service is in priced tokens.

    `counter` is service divided by the weight of its time, plus every lift: a new weight does not rewrite the
    past, and it never falls. `outstanding` is what engines have taken and not served yet, `granted` the cost of
    each grant that no report has confirmed. Until `keeps_place_until` the tenant may come back without a lift.

    Invariants: every lane holds at least one ticket, in order; `queued` and `queued_tokens` are their sums.
    """

    name: str
    number: int
    weight: float = 1.0
    kv_share: float = 1.0
    served: float = 0.0
    counter: float = 0.0
    outstanding: float = 0.0
    granted: dict[str, float] = field(default_factory=dict)
    lanes: dict[str, list[QueuedTicket]] = field(default_factory=dict)
    queued: int = 0
    queued_tokens: int = 0
    keeps_place_until: float = -math.inf

    @property
    def booked(self) -> float:
        """Granted and not served yet."""
        return self.outstanding + sum(self.granted.values()) if self.granted else self.outstanding

    @property
    def key(self) -> float:
        """Virtual service: (served + booked) / weight, lifts included."""
        return self.counter + self.booked / self.weight

    def serve(self, amount: float, *, in_order: bool) -> None:
        """Count service; `in_order` False leaves the tenant's place as it is."""
        self.served += amount
        if in_order:
            self.counter += amount / self.weight

    def add(self, entry: QueuedTicket) -> None:
        insort(self.lanes.setdefault(entry.lane, []), entry)
        self.queued += 1
        self.queued_tokens += entry.ticket.input_tokens

    def remove(self, entry: QueuedTicket) -> None:
        lane = self.lanes[entry.lane]
        del lane[bisect_left(lane, entry)]
        if not lane:
            del self.lanes[entry.lane]
        self.queued -= 1
        self.queued_tokens -= entry.ticket.input_tokens
