"""The tenants that have tickets in a fair queue, in sums."""

from __future__ import annotations

from fractions import Fraction

from policies.tenant_account import TenantAccount


class WaitingTenants:
    """How many tenants wait, and their weights and KV shares in all.

    The sums are exact: next to a weight that is a billion times larger a float would lose the small one, and be 0 once
    the large one has left. A tenant leaves with the weight and share that it joined with.
    """

    def __init__(self) -> None:
        self.count = 0
        self._weight = self._kv_share = Fraction(0)

    @property
    def weight(self) -> float:
        return float(self._weight)

    @property
    def kv_share(self) -> float:
        return float(self._kv_share)

    def join(self, tenant: TenantAccount) -> None:
        self._add(tenant, 1)

    def leave(self, tenant: TenantAccount) -> None:
        self._add(tenant, -1)

    def _add(self, tenant: TenantAccount, sign: int) -> None:
        self.count += sign
        self._weight += sign * Fraction(tenant.weight)
        self._kv_share += sign * Fraction(tenant.kv_share)
