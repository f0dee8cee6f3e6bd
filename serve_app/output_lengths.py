"""The output lengths of tenants as a gateway knows them: learned in the fair queue, from all gateways."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from policies.output_length import DEFAULT_OUTPUT_LENGTH, OutputLength

_UNTOLD = 10_000


class SharedOutputLengths:
    """What the queue told last, and what is to be told to it. One that is lost costs a little precision."""

    def __init__(self) -> None:
        self._known: Mapping[str, OutputLength] = {}
        self._untold: deque[tuple[str, int]] = deque(maxlen=_UNTOLD)

    def of(self, tenant: str) -> OutputLength:
        return self._known.get(tenant, DEFAULT_OUTPUT_LENGTH)

    def observe(self, tenant: str, output_tokens: int) -> None:
        """A sequence of the tenant ended by itself."""
        self._untold.append((tenant, output_tokens))

    def take_untold(self) -> tuple[tuple[str, int], ...]:
        """What was observed since the call before."""
        untold = tuple(self._untold)
        self._untold.clear()
        return untold

    def put_back(self, untold: Sequence[tuple[str, int]]) -> None:
        """The queue did not hear it."""
        self._untold.extendleft(reversed(untold))

    def learn(self, known: Mapping[str, OutputLength]) -> None:
        self._known = known
