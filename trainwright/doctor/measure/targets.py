"""Observes the targets of losses: the range and counts of classes, and the range of binary targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainwright.doctor.facts.data import MOST_CLASSES, TargetsFacts
from trainwright.recorder.plain_tensors import is_plain, rows_of
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Operation, RecordedStep, constants_of
from trainwright.replay.classified import CLASSIFYING
from trainwright.runs.json_values import Facts, strict

EVERY_STEP_UNTIL = 64
"""All steps until this one are read, then every INTERVAL_STEPS-th."""
INTERVAL_STEPS = 16
MAX_CALLS = 8
"""Maximum number of calls of models and of losses that are counted per step."""
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


class Targets(Probe):
    """Keeps 0-d tensors, and one target per row. They are read and counted at examinations."""

    name = TargetsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._targets = 0
        self._classes: Tensor | None = None  # minus the smallest class, and the largest class
        self._binary: Tensor | None = None  # minus the lowest target of a binary loss, and the highest target
        self._waiting: list[Tensor] = []
        self._counts: Tensor | None = None  # counts of each class, and of all larger classes
        self._most: Tensor | None = None
        self._ids: dict[tuple[int, torch.device], Tensor] = {}  # by position among the integer inputs of a step
        self._rows = 0

    def on_closed(self, step: RecordedStep) -> None:
        if step.step <= EVERY_STEP_UNTIL or step.step % INTERVAL_STEPS == 0:
            with torch.no_grad():
                self._observe_ends(step)
                self._record_classes(step)

    def _observe_ends(self, step: RecordedStep) -> None:
        for loss in step.program:
            if not isinstance(loss, Operation) or loss.name not in CLASSIFYING | BINARY:
                continue
            for target in _tensors(loss.args[1:2] or loss.args, loss.kwargs.get("target")):
                if loss.name in BINARY:
                    ends = torch.stack([-target.min(), target.max()]).double()
                    self._binary = ends if self._binary is None else torch.maximum(self._binary, ends)
                elif not target.is_floating_point():
                    largest = target.max()  # ignored targets are below 0
                    ends = torch.stack([-torch.where(target < 0, largest, target).min(), largest])
                    self._targets += target.numel()
                    self._classes = ends if self._classes is None else torch.maximum(self._classes, ends)
                return

    def _record_classes(self, step: RecordedStep) -> None:
        """Keeps one target for each row, because the targets of one image or text are similar."""
        inputs = [each for call in step.calls[:MAX_CALLS] for each in _tensors(call.args, call.kwargs)]
        losses = [each for each in step.program if isinstance(each, Operation) and each.name in CLASSIFYING]
        found = [each for loss in losses[:MAX_CALLS] if loss.with_grad for each in _classes(loss)]
        if not inputs or not found:
            return
        rows = max(1, rows_of(inputs[0]))
        for target in found:
            each = max(1, target.numel() // rows)
            self._waiting.append(target.flatten()[step.step * 7919 % each :: each].long().clone())
        if len(self._waiting) >= EVERY_STEP_UNTIL:
            self._count()
        if step.step <= EVERY_STEP_UNTIL:
            self._record_ids(inputs)

    def _record_ids(self, inputs: Sequence[Tensor]) -> None:
        for place, each in enumerate(each for each in inputs if is_plain(each) and each.dtype in INTEGERS):
            largest, key = each.max(), (place, each.device)
            self._ids[key] = torch.maximum(self._ids.get(key, largest), largest)

    def _count(self) -> None:
        """Counts the kept targets, separately for each call."""
        if not self._waiting:
            return
        self._rows += sum(map(len, self._waiting))
        calls, self._waiting = pad_sequence(self._waiting, batch_first=True, padding_value=-1), []
        places = (calls + 1).clamp_(0, MOST_CLASSES + 1)
        places += (MOST_CLASSES + 2) * torch.arange(len(calls), device=calls.device)[:, None]
        counts = calls.new_zeros(len(calls) * (MOST_CLASSES + 2))
        counts.index_add_(0, places.flatten(), torch.ones_like(counts[:1]).expand(places.numel()))
        counts = counts.view(len(calls), -1)[:, 1:]
        most = counts.max()
        self._counts = counts.sum(0) if self._counts is None else self._counts + counts.sum(0)
        self._most = most if self._most is None else torch.maximum(self._most, most)

    def values(self) -> Facts | None:
        if self._classes is None and self._binary is None:
            return None
        self._count()
        lowest, highest = (0.0, 1.0) if self._binary is None else self._binary.tolist()
        smallest, largest = (1, -1) if self._classes is None else self._classes.tolist()
        facts = TargetsFacts(
            targets=self._targets,
            smallest=-smallest,
            largest=largest,
            lowest=-lowest + 0.0,
            highest=highest,
            counts=self._class_counts(),
            rows=self._rows,
            most=0 if self._most is None else int(self._most),
            ids=tuple(int(each) for each in self._ids.values()),
        )
        return dict(strict(vars(facts)))

    def _class_counts(self) -> tuple[int, ...]:
        """Returns the number of targets of each class, up to the largest class with one."""
        counts = [] if self._counts is None else self._counts.tolist()[:MOST_CLASSES]
        while counts and not counts[-1]:
            counts.pop()
        return tuple(counts)


def _classes(loss: Operation) -> Iterator[Tensor]:
    """Yields the integer targets of a loss over classes."""
    for each in _tensors(loss.args[1:2] or loss.args, loss.kwargs.get("target")):
        if not each.is_floating_point() and is_plain(each):
            yield each
            return


def _tensors(*values: object) -> Iterator[Tensor]:
    """Yields the tensors that come from outside of the recorded program."""
    for each in constants_of(values):
        if each.is_unchanged and each.tensor.numel():
            yield each.tensor.detach()
