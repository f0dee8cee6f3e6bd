"""The price of service in tokens: one formula for the fair queue, the engine and the reports.

Weighted tokens as in Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24), section 3, with a third
price for input tokens found in the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServicePrices:
    """Price per token by kind; the unit is one computed input token."""

    computed_input: float = 1.0
    cached_input: float = 0.1
    output: float = 2.0

    def cost(self, *, computed_input: int = 0, cached_input: int = 0, output: int = 0) -> float:
        """Service of a number of tokens, in input-token units."""
        return self.computed_input * computed_input + self.cached_input * cached_input + self.output * output


DEFAULT_PRICES = ServicePrices()
