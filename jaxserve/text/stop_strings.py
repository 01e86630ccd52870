"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    stop_string: str
    end: int
    """Characters of the piece up to and with the match's last."""


class StopSearch:
    """Looks for the stop string that is complete first; of several, the longest.

    What it finds does not depend on how the text is cut into pieces: it keeps, for each stop
    string, how much of its beginning the text so far ends with (Knuth, Morris and Pratt 1977).
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stop_strings]
        self._matched = [0] * len(stop_strings)

    @property
    def num_open(self) -> int:
        """How many of the last characters may yet turn out to begin a stop string."""
        return max(self._matched, default=0)

    def feed(self, piece: str) -> StopMatch | None:
        """Go through the next piece, up to the first match. Of no use after that."""
        for end, char in enumerate(piece if self._stop_strings else "", start=1):
            for i, stop in enumerate(self._stop_strings):
                length = self._matched[i]
                while length and stop[length] != char:
                    length = self._borders[i][length - 1]
                length += stop[length] == char
                if length == len(stop):
                    return StopMatch(stop, end)
                self._matched[i] = length
        return None


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that it ends with."""
    borders = [0] * len(pattern)
    for i in range(1, len(pattern)):
        length = borders[i - 1]
        while length and pattern[length] != pattern[i]:
            length = borders[length - 1]
        borders[i] = length + (pattern[length] == pattern[i])
    return borders
