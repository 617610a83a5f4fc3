"""Compares the scales of parallel weight matrices before the first step."""

from __future__ import annotations

import math
import re
from typing import TypeAlias

import torch
from torch import Tensor, nn

from trainwright.checkpoint.names import named_modules, named_parameters
from trainwright.doctor.facts.weights import Neighbours, ScalesFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import own_part
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runs.json_values import Facts, strict

MIN_GROUP_SIZE = 4
MIN_SCALE_RATIO = 10.0
"""Groups are reported if the largest scale exceeds the smallest by this factor."""
MAX_GROUPS_REPORTED = 16
Sizes: TypeAlias = dict[str, tuple[Tensor, type[nn.Module], torch.Size]]
"""Scale, module class and shape by name."""
Place: TypeAlias = tuple[str, str, type[nn.Module], torch.Size]
"""The parts of a name before and after a number, the module class, and the shape."""


class Scales(Probe):
    """Reads all matrices once, in the first training pass, so that loading and initialization are included.

    Synchronizes with a GPU only when the facts are read.
    """

    name = ScalesFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._sizes: Sizes | None = None
        self._step, self._is_told = 0, False

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._sizes is None and torch.is_grad_enabled():
            self._sizes = self._read()

    def on_closed(self, step: RecordedStep) -> None:
        if self._sizes is not None and not self._step:
            self._step = step.step

    @torch.no_grad()
    def _read(self) -> Sizes:
        """Returns the root mean square of each matrix. A single row or column is a vector and is left out."""
        names = {id(p): name for name, p in named_parameters(self._roots)}
        found: Sizes = {}
        for _, module in named_modules(self._roots):
            for p in module.parameters(recurse=False):
                is_matrix = p.dim() > 1 and p.numel() > max(p.shape) and p.is_floating_point() and not p.is_meta
                if is_matrix and p.layout is torch.strided and (own := own_part(p.detach())).numel():
                    size = torch.linalg.vector_norm(own.float()) / math.sqrt(own.numel())
                    found.setdefault(names[id(p)], (size, type(module), p.shape))
        return found

    def values(self) -> Facts | None:
        if self._is_told or not self._step or self._sizes is None:
            return None
        self._is_told = True
        groups = _groups(self._sizes)
        unequal = [each for each in groups if max(each.sizes) > MIN_SCALE_RATIO * min(each.sizes)][:MAX_GROUPS_REPORTED]
        facts = ScalesFacts(first=self._step, groups=len(groups), unequal=tuple(unequal))
        return dict(strict(vars(facts)))


def _groups(sizes: Sizes) -> list[Neighbours]:
    """Returns groups of matrices whose names differ in one number."""
    found: dict[Place, list[tuple[int, str, float]]] = {}
    for name, (read, kind, shape) in sizes.items():
        size = float(read)
        for number in re.finditer(r"\d+", name) if size > 0 and math.isfinite(size) else ():
            place = name[: number.start()], name[number.end() :], kind, shape
            found.setdefault(place, []).append((int(number[0]), name, size))
    return [
        Neighbours(
            names=tuple(name for _, name, _ in sorted(some)),
            sizes=tuple(size for *_, size in sorted(some)),
            fan_in=math.prod(shape[1:]),
            is_row=rest.count(".") < 2,
        )
        for (_, rest, _, shape), some in found.items()
        if len(some) >= MIN_GROUP_SIZE
    ]
