"""Observes the targets of losses: the smallest and largest class, and the range of binary targets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainwright.doctor.facts.data import TargetsFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Operation, RecordedStep, constants_of
from trainwright.replay.classified import CLASSIFYING
from trainwright.runlog.json_values import Facts, strict

ALL, PERIOD = 64, 16
"""Every step is read until the first number, then every so many-th."""
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


class Targets(Probe):
    """Keeps 0-d tensors, which are read when a step is examined."""

    name = TargetsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._targets = 0
        self._classes: Tensor | None = None  # minus the smallest class, and the largest
        self._binary: Tensor | None = None  # minus the lowest target of a binary loss, and the highest

    def on_closed(self, step: RecordedStep) -> None:
        if step.step <= ALL or step.step % PERIOD == 0:
            self._note(step)

    @torch.no_grad()
    def _note(self, step: RecordedStep) -> None:
        for loss in step.program:
            if not isinstance(loss, Operation) or loss.name not in CLASSIFYING | BINARY:
                continue
            for target in _tensors(loss.args[1:2] or loss.args, loss.kwargs.get("target")):
                if loss.name in BINARY:
                    ends = torch.stack([-target.min(), target.max()]).double()
                    self._binary = ends if self._binary is None else torch.maximum(self._binary, ends)
                elif not target.is_floating_point():
                    largest = target.max()  # ignored ones are below 0
                    ends = torch.stack([-torch.where(target < 0, largest, target).min(), largest])
                    self._targets += target.numel()
                    self._classes = ends if self._classes is None else torch.maximum(self._classes, ends)
                return

    def values(self) -> Facts | None:
        if self._classes is None and self._binary is None:
            return None
        lowest, highest = (0.0, 1.0) if self._binary is None else self._binary.tolist()
        smallest, largest = (1, -1) if self._classes is None else self._classes.tolist()
        facts = TargetsFacts(
            targets=self._targets, smallest=-smallest, largest=largest, lowest=-lowest + 0.0, highest=highest
        )
        return dict(strict(vars(facts)))


def _tensors(*values: object) -> Iterator[Tensor]:
    """The tensors from outside of the program."""
    for each in constants_of(values):
        if each.is_unchanged and each.tensor.numel():
            yield each.tensor.detach()
