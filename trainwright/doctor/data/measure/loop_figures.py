"""Reads the losses and accuracies that the loop keeps of its evaluations: floats in variables with such names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trainwright.doctor.data.facts import LoopFiguresFacts
from trainwright.doctor.data.measure.tuple_names import NumbersByName
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runlog.json_values import Facts, strict

QUIET = 2
"""Steps after an evaluation at which the names are read again: what changes there is no number of an evaluation."""
WORDS = ("loss", "acc")
"""In the names that are read; others are nobody's business."""


class LoopFigures(Probe):
    """Nothing is read but in the steps around an evaluation, and at a look."""

    name = LoopFiguresFacts.experiment
    closes_late = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._numbers = NumbersByName(watched)
        self._evaluated, self._quiet = False, QUIET
        self._known: dict[str, float] = {}
        self._moving: set[str] = set()
        self._changes: dict[str, int] = {}

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._evaluated = True

    def on_closed(self, step: RecordedStep) -> None:
        if self._evaluated:
            self._read(evaluated=True)
            self._evaluated, self._quiet = False, QUIET
        elif self._quiet:
            self._quiet -= 1
            self._read(evaluated=False)

    def _read(self, *, evaluated: bool) -> None:
        for name, value in figures_among(self._numbers()).items():
            if name in self._known and value != self._known[name]:
                if evaluated:
                    self._changes[name] = self._changes.get(name, 0) + 1
                else:
                    self._moving.add(name)
            elif evaluated and name not in self._known:
                self._changes[name] = 1
            self._known[name] = value

    def values(self) -> Facts | None:
        if self._evaluated:
            self._read(evaluated=True)  # of an evaluation that no step has followed
        names = [name for name in self._changes if name not in self._moving]
        values, changes = [self._known[name] for name in names], [self._changes[name] for name in names]
        facts = LoopFiguresFacts(names=tuple(names), values=tuple(values), changes=tuple(changes))
        return dict(strict(vars(facts))) if self._changes else None


def figures_among(numbers: Mapping[str, float]) -> dict[str, float]:
    """Those that are named as losses or accuracies, and those beside them in a dictionary.

    No whole numbers, and none from lists: these may hold what training has lost, epoch by epoch.
    """
    numbers = {name: value for name, value in numbers.items() if type(value) is float and "[" not in name}
    groups = {name.partition(".")[0] for name in numbers if "." in name and _is_figure(name)}
    return {name: value for name, value in numbers.items() if _is_figure(name) or name.partition(".")[0] in groups}


def _is_figure(name: str) -> bool:
    return any(word in name.lower() for word in WORDS)
