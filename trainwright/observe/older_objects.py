"""Keeps Python's garbage collector from looking through all that torch and a program have made, again and again."""

from __future__ import annotations

from trainwright.engine.step import StepResult
from trainwright.state.train_state import TrainState
from trainwright.world.memory import older_objects

STEPS = 50
"""After so many steps of this process what a run needs is there: modules that are imported late, and early looks."""


class OlderObjectsRest:
    """An Observer. After STEPS steps the collector looks for cycles only among what is made from there on.

    A full collection takes 0.1 s or more, once a quarter as many objects as there were are new and kept: the records of
    a doctor are. What was no longer used before is freed at the end, or where memory runs short.
    """

    def __init__(self) -> None:
        self._count = 0

    def observe(self, result: StepResult, state: TrainState) -> None:
        self._count += 1
        if self._count == STEPS:
            older_objects.rest()

    def close(self) -> None:
        """The collector looks at all again."""
        older_objects.wake()
