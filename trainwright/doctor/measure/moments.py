"""Compares loaded moments of an optimizer with the gradients of its first update."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.names import named_parameters
from trainwright.doctor.facts.updates import LoadedMomentsFacts
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.user_types import Args
from trainwright.runs.json_values import Facts, strict


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
