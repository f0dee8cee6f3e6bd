"""One tenant's live requests inside an engine, and what is counted for it."""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

from engine_actor.sequence import SequenceState
from policies.engine_shares import TenantUse

_by_arrival = attrgetter("id")


class Tenant:
    """Waiting and running requests of a tenant; it exists while it has any.

    `waiting` and `prefilling` (running requests whose known tokens are not all computed) are in order of arrival.
    `pages` counts the page tables of its running requests; `prefill_tokens` are known tokens to compute before
    their requests decode, `input_left` prompt tokens not served yet.
    """

    __slots__ = (
        "input_left", "kv_share", "name", "pages", "prefill_tokens", "prefilling", "running", "waiting", "weight",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.kv_share = 1.0
        self.waiting: deque[SequenceState] = deque()
        self.running: dict[int, SequenceState] = {}
        self.prefilling: list[SequenceState] = []
        self.pages = 0
        self.prefill_tokens = 0
        self.input_left = 0

    @property
    def live(self) -> int:
        return len(self.waiting) + len(self.running)

    def use(self) -> TenantUse:
        head = self.waiting[0] if self.waiting else None
        return TenantUse(
            weight=self.weight,
            running=len(self.running),
            pages=self.pages,
            head_order=None if head is None else head.id,
            head_pages=0 if head is None else head.pages_to_start,
            kv_share=self.kv_share,
        )

    def queue(self, sequence: SequenceState) -> None:
        """Let a request wait at the place of its arrival."""
        if not self.waiting or self.waiting[-1].id < sequence.id:
            self.waiting.append(sequence)
        elif sequence.id < self.waiting[0].id:
            self.waiting.appendleft(sequence)
        else:
            insort(self.waiting, sequence, key=_by_arrival)

    def start(self, sequence: SequenceState) -> None:
        """The head of the waiting requests runs from now on."""
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        insort(self.prefilling, sequence, key=_by_arrival)

    def leave(self, sequence: SequenceState) -> None:
        """A request waits or runs no more."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        del self.running[sequence.id]
        if not sequence.decoding:
            self.prefilling.remove(sequence)
