"""Tells the calls of a model that belong to an evaluation from those that belong to each step."""

from __future__ import annotations

from trainwright.recorder.callers import Line

EACH_STEP = 3
"""Steps in a row before which a place has called the model: a teacher, a target or a rollout does so, and an evaluation
at some of the steps does not."""


class CallPlaces:
    """Counts before how many steps in a row each line of the loop has called a model without gradients.

    ``has_evaluations``: some lines do so before each step, and some do not. Where a loop evaluates at each of its steps
    there are no others, and every call is one of an evaluation.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[Line, int] = {}
        self._now: set[Line] = set()
        self.has_evaluations = False

    def is_of_the_step(self, line: Line) -> bool:
        """Whether a call that comes from this line is one of those before each step, and there are others."""
        self._now.add(line)
        of_each = {known for known, steps in self._in_a_row.items() if steps >= EACH_STEP}
        self.has_evaluations |= bool(of_each) and line not in of_each
        return self.has_evaluations and line in of_each

    def close(self) -> None:
        """A step is over."""
        self._in_a_row = {line: self._in_a_row.get(line, 0) + 1 for line in self._now}
        self._now.clear()
