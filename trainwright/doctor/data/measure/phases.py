"""Whether an evaluation stands between two loops of a program, and so comes once: after a phase, before the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from trainwright.recorder.callers import FrameLine, lines_of_stack

Stack = Sequence[FrameLine]


class Phases:
    """Compares where training was called from before and after the newest evaluation. Reads a few stacks in a run."""

    def __init__(self) -> None:
        self._before: Stack = ()
        self._passes: dict[Hashable, Stack] = {}
        self._after: Stack = ()
        self.is_between = False

    def add(self, site: Hashable) -> None:
        """A pass without gradients is called, the first of its site since the last step."""
        self._passes[site], self._after = lines_of_stack(), ()

    def train(self) -> None:
        """A pass of training is called."""
        if not self._after:
            self._after = lines_of_stack()

    def close(self, site: Hashable) -> None:
        """The step after these passes is over. ``site`` is that of an evaluation; None where there was none."""
        if site in self._passes:
            self.is_between = _goes_straight_on(self._before, self._passes[site], self._after)
        if self._passes or not self._before:
            self._before = self._after
        self._passes = {}


def _goes_straight_on(*stacks: Stack) -> bool:
    """Whether each stands further down than the one before, in the innermost function that called them all."""
    if not all(stacks):
        return False
    common = 0
    while all(len(each) > common for each in stacks) and len({each[common][:2] for each in stacks}) == 1:
        common += 1
    if not common:
        return False
    lines = [each[common - 1][2] for each in stacks]
    return lines == sorted(set(lines))
