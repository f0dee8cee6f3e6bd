"""One engine as the fair queue sees it: its last report plus the grants still on their way to it."""

from __future__ import annotations

from dataclasses import dataclass

from policies.tickets import EngineReport, Ticket

PREFILL_BUFFER_STEPS = 2
"""Steps of prefill that may wait in an engine. With more, the order would be settled there, too early."""


def prompt_pages(ticket: Ticket, page_size: int) -> int:
    """KV pages that a ticket's prompts take, with one page per sequence for the first output tokens."""
    tokens_per_sequence = -(-ticket.input_tokens // ticket.sequences)
    return ticket.sequences * (-(-tokens_per_sequence // page_size) + 1)


def room_to_enter(ticket: Ticket, report: EngineReport) -> tuple[int, int]:
    """Slots and pages that must be free for a ticket to go to the engine.

    A wide ticket (n, prompt lists) needs room for a quarter of the slots and half of the pages at most; the rest of its
    sequences wait inside. Otherwise one with more sequences than slots would stop everybody until the engine is empty.
    """
    pages = prompt_pages(ticket, report.page_size) // ticket.sequences
    sequences = min(ticket.sequences, max(1, report.max_num_seqs // 4))
    sequences = max(1, min(sequences, report.total_pages // 2 // pages))
    return sequences, sequences * pages


@dataclass
class _OnTheWay:
    """Grants that no report has confirmed yet."""

    sequences: int = 0
    input_tokens: int = 0
    pages: int = 0

    def add(self, ticket: Ticket, pages: int, sign: int) -> None:
        self.sequences += sign * ticket.sequences
        self.input_tokens += sign * ticket.input_tokens
        self.pages += sign * pages


class EngineLoad:
    """Capacity of one engine in one engine epoch.

    A grant counts here from the moment it is given until a report says that the engine has taken the request
    (the report's own numbers hold it from then on) or its time to live has passed. Two grants given between
    two reports therefore never share the same room.
    """

    def __init__(self, report: EngineReport) -> None:
        self._granted = _OnTheWay()
        self._granted_by_tenant: dict[str, _OnTheWay] = {}
        self._granted_work = 0.0
        self.reclaiming = 0
        """Sequences on their way that find a place only when the engine takes one from somebody else."""
        self._cached_pages: set[int] = set()
        self.update(report)

    def update(self, report: EngineReport) -> None:
        """Take a newer report of the same engine epoch."""
        self.report = report
        self._cached_pages.difference_update(report.page_hashes_removed)
        self._cached_pages.update(report.page_hashes_added)
        self._reported_work = sum(report.outstanding.values())

    @property
    def work(self) -> float:
        """Priced work not served yet: what the least loaded engine has least of."""
        return self._reported_work + self._granted_work

    @property
    def sequences(self) -> int:
        """Sequences in the engine or on their way to it."""
        return self.report.running + self.report.waiting + self._granted.sequences

    @property
    def free_pages(self) -> int:
        """Pages that neither a request in the engine nor one on its way takes."""
        return self.report.free_pages - self._granted.pages

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that wait in the engine or are on their way to it."""
        return self.report.waiting_prefill_tokens + self._granted.input_tokens

    def tenants(self) -> set[str]:
        """Tenants with sequences in the engine or on their way to it."""
        return self.report.live_sequences.keys() | self._granted_by_tenant.keys()

    def tenant_sequences(self) -> dict[str, int]:
        """Sequences per tenant in the engine or on their way to it."""
        held = dict(self.report.live_sequences)
        for tenant, granted in self._granted_by_tenant.items():
            held[tenant] = held.get(tenant, 0) + granted.sequences
        return held

    def tenant_pages(self) -> dict[str, int]:
        """Pages that each tenant's requests hold, or will take on arrival."""
        held = dict(self.report.tenant_pages)
        for tenant, granted in self._granted_by_tenant.items():
            held[tenant] = held.get(tenant, 0) + granted.pages
        return held

    def held_by(self, tenant: str) -> tuple[int, int]:
        """Sequences and pages of one tenant, those of requests on their way included."""
        granted = self._granted_by_tenant.get(tenant) or _OnTheWay()
        return (
            self.report.live_sequences.get(tenant, 0) + granted.sequences,
            self.report.tenant_pages.get(tenant, 0) + granted.pages,
        )

    def cached_tokens(self, ticket: Ticket) -> int:
        """Input tokens of the ticket, over all its sequences, whose pages are in the engine's prefix cache."""
        pages = 0
        for page in ticket.page_hashes:
            if page not in self._cached_pages:
                break
            pages += 1
        # The last token of a prompt is always computed: its logits are needed.
        return min(
            pages * self.report.page_size * ticket.sequences, max(0, ticket.input_tokens - ticket.sequences)
        )

    def fits(self, ticket: Ticket) -> bool:
        """Whether the engine can take the ticket now.

        An engine that holds nothing takes any ticket: one larger than the engine's limits would otherwise
        stand at the head of the queue for ever, and the engine is the one to judge it.
        """
        if self.report.draining:
            return False
        if self.sequences == 0:
            return True
        return self.has_slots(ticket) and self.has_pages(ticket) and self.has_prefill_room()

    def has_slots(self, ticket: Ticket) -> bool:
        return self.sequences + room_to_enter(ticket, self.report)[0] <= self.report.max_num_seqs

    def has_pages(self, ticket: Ticket) -> bool:
        return room_to_enter(ticket, self.report)[1] <= self.free_pages

    def has_prefill_room(self) -> bool:
        """The prefill buffer is not full. The next prompt itself does not count: an engine never runs dry behind
        one long prompt."""
        return self.prefill_tokens < PREFILL_BUFFER_STEPS * self.report.max_num_batched_tokens

    def has_prefill_share(self, tenant: str, share: float) -> bool:
        """The tenant's own part of the prefill buffer, `share` of the whole, is not full."""
        granted = self._granted_by_tenant.get(tenant)
        own = self.report.tenant_prefill_tokens.get(tenant, 0) + (granted.input_tokens if granted else 0)
        return own < share * PREFILL_BUFFER_STEPS * self.report.max_num_batched_tokens

    def add_grant(self, ticket: Ticket, cost: float, reclaims: bool = False) -> None:
        self._count(ticket, cost, reclaims, 1)

    def remove_grant(self, ticket: Ticket, cost: float, reclaims: bool = False) -> None:
        self._count(ticket, cost, reclaims, -1)

    def _count(self, ticket: Ticket, cost: float, reclaims: bool, sign: int) -> None:
        pages = prompt_pages(ticket, self.report.page_size)
        own = self._granted_by_tenant.setdefault(ticket.tenant, _OnTheWay())
        for counted in (self._granted, own):
            counted.add(ticket, pages, sign)
        if own.sequences == 0:
            del self._granted_by_tenant[ticket.tenant]
        self._granted_work += sign * cost
        if reclaims:
            self.reclaiming += sign * ticket.sequences
