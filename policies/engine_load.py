"""One engine as the fair queue sees it: its last report plus the grants still on their way to it."""

from __future__ import annotations

from policies.tickets import EngineReport, Ticket

PREFILL_BUFFER_STEPS = 2
"""Steps of prefill that may wait in an engine. With more, the order would be settled there, too early."""


def prompt_pages(ticket: Ticket, page_size: int) -> int:
    """KV pages that a ticket's prompts take, with one page per sequence for the first output tokens."""
    tokens_per_sequence = -(-ticket.input_tokens // ticket.sequences)
    return ticket.sequences * (-(-tokens_per_sequence // page_size) + 1)


class EngineLoad:
    """Capacity of one engine in one engine epoch.

    A grant counts here from the moment it is given until a report says that the engine has taken the request
    (the report's own numbers hold it from then on) or its time to live has passed. Two grants given between
    two reports therefore never share the same room.
    """

    def __init__(self, report: EngineReport) -> None:
        self._granted_sequences = 0
        self._granted_input_tokens = 0
        self._granted_pages = 0
        self._granted_work = 0.0
        self.update(report)

    def update(self, report: EngineReport) -> None:
        """Take a newer report of the same engine epoch."""
        self.report = report
        self._reported_work = sum(report.outstanding.values())

    @property
    def work(self) -> float:
        """Priced work not served yet: what the least loaded engine has least of."""
        return self._reported_work + self._granted_work

    @property
    def sequences(self) -> int:
        """Sequences in the engine or on their way to it."""
        return self.report.running + self.report.waiting + self._granted_sequences

    def fits(self, ticket: Ticket) -> bool:
        """Whether the engine can take the ticket now.

        An engine that holds nothing takes any ticket: one larger than the engine's limits would otherwise
        stand at the head of the queue for ever, and the engine is the one to judge it.
        """
        report = self.report
        if report.draining:
            return False
        if self.sequences == 0:
            return True
        prefill = report.waiting_prefill_tokens + self._granted_input_tokens
        free_pages = report.free_pages - self._granted_pages
        return (
            self.sequences + ticket.sequences <= report.max_num_seqs
            # The ticket's own input does not count: an engine never runs dry behind one long prompt.
            and prefill < PREFILL_BUFFER_STEPS * report.max_num_batched_tokens
            and prompt_pages(ticket, report.page_size) <= free_pages
        )

    def add_grant(self, ticket: Ticket, cost: float) -> None:
        self._count(ticket, cost, 1)

    def remove_grant(self, ticket: Ticket, cost: float) -> None:
        self._count(ticket, cost, -1)

    def _count(self, ticket: Ticket, cost: float, sign: int) -> None:
        self._granted_sequences += sign * ticket.sequences
        self._granted_input_tokens += sign * ticket.input_tokens
        self._granted_pages += sign * prompt_pages(ticket, self.report.page_size)
        self._granted_work += sign * cost
