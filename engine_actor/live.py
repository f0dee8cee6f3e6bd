"""Every request of an engine from acceptance to its last row: by id, by key and by tenant."""

from __future__ import annotations

from collections import OrderedDict

from engine_actor.sequence import SequenceState
from engine_actor.tenant import Tenant

_REMEMBERED_KEYS = 10_000


class LiveRequests:
    """Live requests and their tenants; a tenant is here while it has any.

    Invariant: `prefill_tokens` is the sum of the tenants' own.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, SequenceState] = {}
        self.tenants: dict[str, Tenant] = {}
        self.prefill_tokens = 0
        self._by_key: dict[tuple[str, int], SequenceState] = {}
        self._recent: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.by_id)

    def remember(self, key: tuple[str, int]) -> bool:
        """Note a (request, attempt). False if it was noted before and is live or not long gone."""
        if key in self._by_key or key in self._recent:
            return False
        self._recent[key] = None
        if len(self._recent) > _REMEMBERED_KEYS:
            self._recent.popitem(last=False)
        return True

    def find(self, key: tuple[str, int]) -> SequenceState | None:
        return self._by_key.get(key)

    def tenant(self, name: str, weight: float, kv_share: float) -> Tenant:
        """The tenant of a request to be added; the last weight and KV share given hold."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name)
        tenant.weight, tenant.kv_share = weight, kv_share
        return tenant

    def add(self, sequence: SequenceState) -> None:
        """A new request waits from now on."""
        tenant = sequence.tenant
        self.by_id[sequence.id] = self._by_key[sequence.key] = sequence
        tenant.queue(sequence)
        tenant.input_left += sequence.prompt_tokens
        self.count_prefill(tenant, sequence.prompt_tokens)

    def remove(self, sequence: SequenceState) -> None:
        """The request has ended. Its slot, if it has one, is the caller's to take back afterwards."""
        tenant = sequence.tenant
        if not sequence.decoding:
            self.count_prefill(tenant, -sequence.pending)
        tenant.leave(sequence)
        tenant.input_left -= max(0, sequence.prompt_tokens - sequence.served)
        if not tenant.live:
            del self.tenants[tenant.name]
        del self.by_id[sequence.id]
        del self._by_key[sequence.key]

    def count_prefill(self, tenant: Tenant, tokens: int) -> None:
        """So many more known tokens of the tenant (fewer, when negative) are to be computed before it decodes."""
        tenant.prefill_tokens += tokens
        self.prefill_tokens += tokens
