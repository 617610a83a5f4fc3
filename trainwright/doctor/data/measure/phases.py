"""Whether an evaluation stands between two loops of a program, and so comes once: after a phase, before the next."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.recorder.callers import FrameLine, lines_of_stack

Stack = Sequence[FrameLine]


class Phases:
    """Compares where training was called from before and after the newest evaluation. Reads a few stacks in a run."""

    def __init__(self) -> None:
        self._before: Stack = ()
        self._evaluated: Stack = ()
        self._is_open = True
        self.is_between = False

    def evaluate(self) -> None:
        """The first pass of an evaluation is called."""
        self._evaluated, self._is_open, self.is_between = lines_of_stack(), True, False

    def train(self) -> None:
        """A pass of training is called."""
        if not self._is_open:
            return
        now, self._is_open = lines_of_stack(), False
        if self._evaluated:
            self.is_between = _goes_straight_on(self._before, self._evaluated, now)
        self._before = now


def _goes_straight_on(*stacks: Stack) -> bool:
    """Whether each stands further down than the one before, in the innermost function that called them all."""
    common = 0
    while all(len(each) > common for each in stacks) and len({each[common][:2] for each in stacks}) == 1:
        common += 1
    if not common:
        return False
    lines = [each[common - 1][2] for each in stacks]
    return lines == sorted(set(lines))
