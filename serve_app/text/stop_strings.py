"""Stop strings in a stream: found across any cut of the text, and no part of one is ever shown.

One Knuth-Morris-Pratt automaton per stop string. Its state is the length of the longest end of the text
that begins the stop string, so the text to hold back is the longest state, and not a character more.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Text in, safe text out. The stop string whose end comes first wins; of those that end together the
    longest.

    The outcome depends on the text alone, not on how it is cut into pieces. Stop strings must not be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that can be shown now. After a match `matched` is set, and whatever comes then is dropped."""
        if self.matched is not None or not self._stops:
            return "" if self._stops else text
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            if self._advance(character):
                self._held = ""
                return pending[: position - len(self.matched or "")]
        safe = len(pending) - max(self._states)
        self._held = pending[safe:]
        return pending[:safe]

    def finish(self) -> str:
        """The text held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> bool:
        for index, (stop, failure) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = failure[state - 1]
            state += stop[state] == character
            self._states[index] = state
            if state == len(stop) and len(stop) > len(self.matched or ""):
                self.matched = stop
        return self.matched is not None


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its end."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = table[length - 1]
        length += stop[position] == stop[length]
        table[position] = length
    return table
