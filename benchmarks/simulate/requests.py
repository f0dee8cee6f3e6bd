"""What is simulated: requests with their arrival times, and a scenario of them."""

from __future__ import annotations

from dataclasses import dataclass

from policies.tickets import ServiceClass

PREFIX_BLOCK_TOKENS = 512
"""Tokens of a prefix block, as in the Mooncake traces."""

_UNIQUE_TOKENS = 1 << 30  # token ids from here on are in no prefix block


@dataclass(frozen=True)
class SimulatedRequest:
    """One request of one tenant. It ends by itself after `output_tokens`; the engine does not know that before.

    Targets (`slo_*`) are seconds, as a client would set them in headers: time to first token, mean time per
    output token after it, and time to the last token. None: the request has none of that kind.
    `prefix_blocks` name the blocks of PREFIX_BLOCK_TOKENS tokens that the prompt consists of: equal ids, equal
    tokens. Without them no two prompts share a prefix. The client gives up `cancel_after_s` after its arrival.
    `kv_share`, in (0, 1], is the part of an engine's KV pages that the tenant may hold while another one waits.
    """

    arrival_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    weight: float = 1.0
    service_class: ServiceClass = "default"
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_deadline_s: float | None = None
    cancel_after_s: float | None = None
    prefix_blocks: tuple[int, ...] = ()
    kv_share: float = 1.0

    @property
    def has_targets(self) -> bool:
        return (self.slo_ttft_s, self.slo_tpot_s, self.slo_deadline_s) != (None, None, None)

    def prompt_token_ids(self, index: int) -> list[int]:
        """Token ids of the prompt. `index` is unique per request and below 2**30."""
        if not self.prefix_blocks:
            # The first token tells prompts apart; the prefix cache compares whole prefixes.
            return [_UNIQUE_TOKENS + index, *range(self.input_tokens - 1)]
        tokens: list[int] = []
        for block in self.prefix_blocks:
            tokens.extend(range(block * PREFIX_BLOCK_TOKENS, (block + 1) * PREFIX_BLOCK_TOKENS))
        return tokens[: self.input_tokens]


@dataclass(frozen=True)
class Scenario:
    """Requests in order of arrival. `horizon_s` ends the run there; None lets every request end."""

    name: str
    requests: tuple[SimulatedRequest, ...]
    horizon_s: float | None = None
