"""Steps in a row on the same rows, and whether the part of the program that makes them also trains on others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from trainwright.recorder.callers import lines_of_stack


class Repeats:
    """Runs of steps on the same rows: how many steps repeat the one before, in the longest run and in the second.

    ``is_within``: the place that made the longest run has trained on other rows as well.
    """

    def __init__(self) -> None:
        self.longest = self.longest_to = self.second = 0
        self.is_within = False
        self._ended = self._now = 0  # the longest of the runs that have ended, and the one that goes on
        self._place: Hashable = None
        self._rows: Sequence[int] = ()
        self._latest: dict[Hashable, Sequence[int]] = {}
        self._varied: set[Hashable] = set()

    def add(self, step: int, rows: Sequence[int], place: Hashable) -> None:
        """A step at this place of the program has read these rows."""
        if self._latest.get(place, rows) != rows:
            self._varied.add(place)
        self._latest[place] = rows
        if rows == self._rows and not _is_one_start(rows):
            self._now += 1
        else:
            self.second, self._ended = sorted([self.second, self._ended, self._now])[-2:]
            self._now = 0
        self._rows = rows
        if self._now > self.longest:
            self.longest, self.longest_to, self._place = self._now, step, place
            self.second = self._ended
        self.is_within = self._place in self._varied


def _is_one_start(rows: Sequence[int]) -> bool:
    """Whether it is one row many times, of walks, say: what follows from it is computed."""
    return len(set(rows)) == 1 < len(rows)


def place_of_call() -> Hashable:
    """Where the program stands: the line of each function on this stack. About 5 us."""
    return tuple(each[1:] for each in lines_of_stack())
