"""How much may wait in a fair queue: hard caps, and dynamic thresholds that leave room for everybody."""

from __future__ import annotations

from dataclasses import dataclass

from policies.tenant_account import TenantAccount
from policies.tickets import Ticket


@dataclass(frozen=True)
class QueueCaps:
    """Requests and input tokens that may wait, of one tenant and in all.

    Beside the caps, no tenant holds more than what is still free in all (dynamic thresholds, Choudhury and
    Hahne, 1998). So the flood of one tenant stops at half of the total, n floods leave one part in n + 1 free,
    and nobody is shut out.
    """

    max_queued_requests: int
    max_queued_per_tenant: int
    max_queued_tokens: int
    max_queued_tokens_per_tenant: int

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError("queue caps must be at least 1")

    def refuse(self, ticket: Ticket, tenant: TenantAccount, requests: int, tokens: int) -> str | None:
        """Why the ticket may not wait, None if it may. `requests` and `tokens` are what waits in all."""
        own, own_tokens = tenant.queued, tenant.queued_tokens
        if own >= self.max_queued_per_tenant:
            return f"{own} requests of this tenant are waiting (max_queued_per_tenant)"
        if own >= self.max_queued_requests - requests:
            return f"{requests} requests are waiting, {own} of this tenant (max_queued_requests)"
        if own_tokens + ticket.input_tokens > self.max_queued_tokens_per_tenant:
            return f"{own_tokens} tokens of this tenant are waiting (max_queued_tokens_per_tenant)"
        free = self.max_queued_tokens - tokens
        if ticket.input_tokens > free or (own_tokens and own_tokens >= free):
            return f"{tokens} tokens are waiting, {own_tokens} of this tenant (max_queued_tokens)"
        return None
