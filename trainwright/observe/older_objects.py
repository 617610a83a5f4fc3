"""Keeps Python's garbage collector from looking through all that torch and a program have made, again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.engine.step import StepResult
from trainwright.state.train_state import TrainState
from trainwright.world.memory import older_objects

STEPS = 50
"""After so many steps of this process what a run needs is there: modules that are imported late, and early looks."""
_NEVER = 2**30


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


@contextmanager
def only_newest_collected() -> Iterator[None]:
    """A context in which the collector looks among the newest objects alone, and at its end among those made in it.

    For what makes many objects that live for a while and go, as a look of the doctor does: they would be counted as new
    and kept, and make a full collection due, which then falls on a step of the loop.
    """
    newest, young, whole = gc.get_threshold()
    if not gc.isenabled():
        yield
        return
    gc.set_threshold(newest, _NEVER, whole)
    try:
        yield
    finally:
        gc.set_threshold(newest, young, whole)
        gc.collect(1)
