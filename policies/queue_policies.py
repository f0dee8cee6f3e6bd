"""The orders of a fair queue by name."""

from __future__ import annotations

from typing import Literal, get_args

from policies.baseline_orders import DlpmOrder, DrrOrder, FcfsOrder, RateLimitOrder
from policies.queue_order import CachedTokens, QueueOrder, VtcOrder

QueuePolicy = Literal["vtc", "fcfs", "rpm", "lcf", "drr", "dlpm"]
QUEUE_POLICIES: tuple[QueuePolicy, ...] = get_args(QueuePolicy)


def make_order(
    policy: str, cached_tokens: CachedTokens, locality_window: float, batch_share: float
) -> QueueOrder:
    """The order of that name. Window and batch share are of VTC and LCF alone. Raises ValueError for another name."""
    if policy in ("vtc", "lcf"):
        return VtcOrder(cached_tokens, lift=policy == "vtc", window=locality_window, batch_share=batch_share)
    if policy == "fcfs":
        return FcfsOrder()
    if policy == "rpm":
        return RateLimitOrder()
    if policy == "drr":
        return DrrOrder()
    if policy == "dlpm":
        return DlpmOrder(cached_tokens)
    raise ValueError(f"unknown queue policy {policy!r}, allowed: {', '.join(QUEUE_POLICIES)}")
