"""What a loop makes of the losses of its training, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainwright.doctor.data.facts import TrainingAveragesFacts
from trainwright.doctor.data.measure.figure_parts import EscapeLine, FigureParts
from trainwright.doctor.data.measure.kept_numbers import KeptNumbers
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Loader
from trainwright.replay.replayer import batch_size
from trainwright.runlog.json_values import Facts, strict

STEPS, WINDOWS = 1024, 4
"""Steps of an epoch, and epochs, that are kept."""
LAST = "[-1]"
"""In the names of what a list holds last."""


class TrainingAveragesProbe(Probe):
    """An epoch ends where a loader begins anew, or the model goes into eval mode. Later epochs are not read."""

    name = TrainingAveragesFacts.experiment
    closes_late = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._numbers, self._kept = watched.numbers, KeptNumbers()
        self._losses: list[list[Tensor]] = []
        self._rows: list[int] = []
        self._before: Mapping[str, float] = {}
        self._early: Mapping[str, float] = {}
        self._by_step: set[str] = set()
        self._facts: TrainingAveragesFacts | None = None
        self._is_over = False
        self._windows = 0

    def on_closed(self, step: RecordedStep) -> None:
        if self._windows >= WINDOWS or len(self._losses) >= STEPS:
            return
        if self._is_over:
            self._read()
            self._kept.add_up(self._parts())
            self._losses, self._rows, self._is_over = [], [], False
            self._windows += 1
        self._losses.append(list(step.losses))
        self._rows.append(batch_size(step) or 1)
        self._hear_lists()

    def _hear_lists(self) -> None:
        """What a list holds last is of a step, where it is another after each of the first two steps of an epoch."""
        if len(self._losses) == 1:
            self._early = self._numbers()
        elif len(self._losses) == 2:
            known = {name: value for name, value in self._numbers().items() if LAST in name}
            self._by_step |= {name for name, value in known.items() if self._early.get(name) != value}

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._end()

    def on_mode(self, module: nn.Module, training: bool) -> None:
        if not training:
            self._end()

    def _end(self) -> None:
        if self._losses and self._windows < WINDOWS:
            self._read()
            self._is_over = True

    def values(self) -> Facts | None:
        return None if self._facts is None else dict(strict(vars(self._facts)))

    def end(self, error: BaseException | None) -> None:
        self._end()

    def _read(self) -> None:
        if not (known := self._parts()):
            return
        numbers = {name: value for name, value in self._numbers().items() if name not in self._by_step}
        kept = self._kept.read(numbers, self._before, known, is_over=False)
        self._before = numbers
        if kept:
            steps = len(self._losses)
            self._facts = TrainingAveragesFacts(steps=steps, numbers=tuple(kept))

    def _parts(self) -> list[FigureParts]:
        """Each step, its losses as they are and added up: one of micro-batches is often divided by their number."""
        if not 2 <= len(self._losses) < STEPS or not all(self._losses):
            return []
        line = EscapeLine(None, "the losses of training", "mean", False, self._windows)
        flat = torch.stack([torch.stack([each.double().reshape(()) for each in one]).sum() for one in self._losses])
        counts = tuple(len(each) for each in self._losses)
        told, rows = tuple(flat.tolist()), tuple(map(float, self._rows))
        parts = [FigureParts(line, "rows", told, tuple(a * b for a, b in zip(told, rows)), rows)]
        if max(counts) > 1:
            means = tuple(a / b for a, b in zip(told, counts))
            parts.append(FigureParts(line, "rows", means, tuple(a * b for a, b in zip(means, rows)), rows))
        return parts
