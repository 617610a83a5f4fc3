"""Observes the targets of losses: the largest class, and the range of binary targets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainwright.doctor.facts.data import TargetsFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Operation, RecordedStep, constants_of
from trainwright.replay.classified import CLASSIFYING

EVERY_STEP_UNTIL = 64  # All steps until this one are read, then every INTERVAL_STEPS-th
INTERVAL_STEPS = 16
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


class Targets(Probe):
    """Keeps 0-d tensors, which are read at examinations."""

    name = TargetsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._targets = 0
        self._largest: Tensor | None = None
        self._binary: Tensor | None = None  # minus the lowest target of a binary loss, and the highest target

    def on_closed(self, step: RecordedStep) -> None:
        if step.step <= EVERY_STEP_UNTIL or step.step % INTERVAL_STEPS == 0:
            with torch.no_grad():
                self._observe(step)

    def _observe(self, step: RecordedStep) -> None:
        for loss in step.program:
            if not isinstance(loss, Operation) or loss.name not in CLASSIFYING | BINARY:
                continue
            for target in _tensors(loss.args[1:2] or loss.args, loss.kwargs.get("target")):
                if loss.name in BINARY:
                    ends = torch.stack([-target.min(), target.max()]).double()
                    self._binary = ends if self._binary is None else torch.maximum(self._binary, ends)
                elif not target.is_floating_point():
                    largest = target.max()
                    self._targets += target.numel()
                    self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
                return

    def facts(self) -> TargetsFacts | None:
        if self._largest is None and self._binary is None:
            return None
        lowest, highest = (0.0, 1.0) if self._binary is None else self._binary.tolist()
        return TargetsFacts(
            targets=self._targets,
            largest=-1 if self._largest is None else int(self._largest),
            lowest=-lowest + 0.0,
            highest=highest,
        )


def _tensors(*values: object) -> Iterator[Tensor]:
    """Yields the tensors that come from outside of the recorded program."""
    for each in constants_of(values):
        if each.is_unchanged and each.tensor.numel():
            yield each.tensor.detach()
