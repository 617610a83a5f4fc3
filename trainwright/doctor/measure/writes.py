"""Observes changes of the weights between two updates, and compares loaded moments with gradients."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.names import named_parameters
from trainwright.doctor.facts.updates import LoadedMomentsFacts, WritesFacts
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runs.json_values import Facts, strict

WEIGHTS_COMPARED = 2
"""Number of compared weights, the smallest ones, because they are copied after every update."""
MAX_ELEMENTS = 4096


class Writes(Probe):
    """Compares a sample of the weights after an update and before the next one, if the model was evaluated in
    between.
    """

    name = WritesFacts.experiment
    hears_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        held = {id(p): p for o in watched.subject.optimizers for p in owned_by(o) if p.requires_grad}
        small = sorted((p for p in held.values() if 1 < p.numel() <= MAX_ELEMENTS), key=Tensor.numel)
        self._weights = [p for p in small if type(p) is nn.Parameter][:WEIGHTS_COMPARED]
        self._optimizers = watched.subject.optimizers
        self._after: list[Tensor] = []
        self._state: list[tuple[int, int]] = []
        self._step = self._compared = 0
        self._is_evaluated = False
        self._steps: list[int] = []

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not torch.is_grad_enabled():
            self._is_evaluated = True
        elif self._after:
            before, self._after = self._after, []
            if self._is_evaluated:
                self._compared += 1
                differ = not any(torch.equal(old, p) for old, p in zip(before, self._weights))
                if differ and self._state == self._of_state():
                    self._steps.append(self._step + 1)
                    self.urgent |= len(self._steps) <= 3

    def on_closed(self, step: RecordedStep) -> None:
        self._step, self._is_evaluated = step.step, False
        self._after, self._state = [p.detach().clone() for p in self._weights], self._of_state()

    def _of_state(self) -> list[tuple[int, int]]:
        """Returns identity and version of the optimizer state. A loop that rolls back restores it, too."""
        return [
            (id(each), 0 if each.is_inference() else each._version)
            for optimizer in (self._optimizers if self._weights else ())
            for each in optimizer.state.get(self._weights[0], {}).values()
            if isinstance(each, Tensor)
        ]

    def values(self) -> Facts | None:
        self.urgent = False
        return dict(strict(vars(WritesFacts(self._compared, tuple(self._steps[-32:]))))) if self._compared else None


class Moments(Probe):
    """Compares second moments that exist before the first update with the squared gradients of that update."""

    name = LoadedMomentsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._names = {id(p): name for name, p in named_parameters(watched.subject.roots)}
        self._unseen = {id(each): each for each in watched.subject.optimizers}
        self._facts: LoadedMomentsFacts | None = None

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if self._unseen and self._unseen.pop(id(optimizer), None) is not None:
            self._facts = _moments_of(optimizer, self._names) or self._facts
            self.urgent = self._facts is not None

    def values(self) -> Facts | None:
        facts, self._facts, self.urgent = self._facts, None, False
        return None if facts is None else dict(strict(vars(facts)))


@torch.no_grad()
def _moments_of(optimizer: Optimizer, names: dict[int, str]) -> LoadedMomentsFacts | None:
    by_shape: defaultdict[torch.Size, list[tuple[str, float, float]]] = defaultdict(list)
    for p in owned_by(optimizer):
        second = optimizer.state.get(p, {}).get("exp_avg_sq")
        if not isinstance(second, Tensor) or second.shape != p.shape or p.grad is None or p.grad.is_sparse:
            continue
        moment, squared = float(second.float().mean()), float(p.grad.float().square().mean())
        if moment > 0.0 and squared > 0.0 and math.isfinite(moment) and math.isfinite(squared):
            by_shape[p.shape].append((names.get(id(p), "a weight"), math.log10(moment), math.log10(squared)))
    rows = [row for each in by_shape.values() if len(each) > 1 for row in each]
    if not rows:
        return None
    matched = [
        abs(moment - squared)
        for each in by_shape.values()
        if len(each) > 1
        for moment, squared in zip(sorted(row[1] for row in each), sorted(row[2] for row in each))
    ]
    rows.sort(key=lambda row: -abs(row[1] - row[2]))
    return LoadedMomentsFacts(
        kind=type(optimizer).__name__,
        names=tuple(row[0] for row in rows[:64]),
        gaps=tuple(abs(row[1] - row[2]) for row in rows[:64]),
        matched=sum(matched) / len(matched),
    )
