"""Whether what is evaluated lies where the inputs lie that are trained on: mean and deviation of each feature."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from trainwright.doctor.data.facts import Likeness
from trainwright.doctor.data.measure.features import columns_of
from trainwright.recorder.plain_tensors import plain

EARLY, LEAST, MOST = 8, 32, 4096
"""Passes at the beginning of training that are read; samples without which nothing is said; samples that are enough."""

PART, FEWEST = 0.1, 3
"""Of the features, and how many at least, that may be prepared in another way than the rest."""


class InputMoments:
    """Sums over samples, and over their pixels and positions. Nothing is read from a GPU before ``moments``."""

    def __init__(self) -> None:
        self.samples = 0
        self.shapes: set[tuple[int, ...]] = set()  # of a row
        self._count, self._sum, self._squares = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
        self._fractions = torch.zeros((), device="cpu")

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor]) -> None:
        """Takes the first floating-point input of a pass."""
        x = columns_of(tensors)
        if x is None or self.samples >= MOST or (self.samples and self._sum.shape != x.shape[1:]):
            return
        wide = x.double()
        rows = next(len(each) for each in plain(tensors) if each.is_floating_point() and each.dim() > 1)
        self.shapes |= {tuple(each.shape[1:]) for each in tensors}
        self.samples, self._count = self.samples + rows, self._count + len(wide)
        self._sum, self._squares = self._sum.to(wide) + wide.sum(0), self._squares.to(wide) + wide.square().sum(0)

        self._fractions = self._fractions.to(wide) + (wide != wide.round()).double().mean(1).sum(0)

    def fractions(self) -> float:
        """The share of values that are no whole numbers."""
        return float(self._fractions) / max(1, self._count)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each feature."""
        mean = self._sum / max(1, self._count)
        return mean, (self._squares / max(1, self._count) - mean.square()).clamp(min=0).sqrt()


class InputsMoments:
    """The same of each floating-point input of a pass, by its place among the inputs."""

    def __init__(self) -> None:
        self.of: dict[int, InputMoments] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        for place, each in enumerate(plain(tensors)):
            if each.is_floating_point() and each.dim() > 1:
                self.of.setdefault(place, InputMoments()).add([each])


class Likenesses:
    """Reads the first passes of training, the first after each evaluation that is read, and the passes of each site
    without gradients.
    """

    def __init__(self) -> None:
        self._early, self._after = InputsMoments(), InputsMoments()
        self._evaluated: dict[Hashable, InputsMoments] = {}
        self._passes = 0
        self._kind: type[nn.Module] | None = None
        self.wants_training = True

    def train(self, root: nn.Module, tensors: Sequence[Tensor]) -> None:
        """A pass of training. Of several models the first that is called is read, and copies of it."""
        self._kind = self._kind or type(root)
        if type(root) is not self._kind:
            return
        if self._passes < EARLY:
            self._early.add(tensors)
        elif self._evaluated:
            self._after.add(tensors)
        self._passes += 1
        self.wants_training = self._passes < EARLY

    def evaluate(self, root: nn.Module, tensors: Sequence[Tensor], site: Hashable) -> None:
        """A pass without gradients."""
        if type(root) is not self._kind:
            return
        if not self._evaluated:
            self._after = InputsMoments()
        self._evaluated.setdefault(site, InputsMoments()).add(tensors)
        self.wants_training = True

    def close(self, sites: Container[Hashable]) -> list[Likeness]:
        """Compares the inputs of the last of these sites with training. The most alike part of training counts."""
        evaluated = [each for site, each in self._evaluated.items() if site in sites]
        self._evaluated.clear()
        self.wants_training = self._passes < EARLY
        parts = (self._early, self._after)
        known = [
            list(_compared(each, [part.of[place] for part in parts if place in part.of]))
            for place, each in (sorted(evaluated[-1].of.items()) if evaluated else ())
        ]
        return [min(of, key=lambda each: each.distance) for of in known if of]


def _compared(evaluated: InputMoments, parts: Sequence[InputMoments]) -> Iterator[Likeness]:
    if evaluated.samples < LEAST:
        return
    mean, std = evaluated.moments()
    for part in parts:
        if part.samples < LEAST:
            continue
        usual, spread = part.moments()
        varies = spread > 1e-6 * (usual.abs() + spread)
        if usual.shape != mean.shape or not bool(varies.any()):
            continue
        shifts, ratios = ((mean - usual).abs() / spread)[varies], (std / spread)[varies]
        noise = math.sqrt(1 / evaluated.samples + 1 / part.samples)
        is_cut = not part.fractions() and evaluated.fractions() > 0.5
        yield Likeness(
            samples=evaluated.samples,
            shift=float(shifts.median()),
            ratio=float(ratios.median()),
            noise=noise,
            is_cut=is_cut,
            trained=_only(part.shapes),
            evaluated=_only(evaluated.shapes),
            part_shift=_of_a_part(shifts),
        )


def _of_a_part(shifts: Tensor) -> float:
    """How far those features are away at least that are farther than the others."""
    many = max(FEWEST, math.ceil(len(shifts) * PART))
    return float(shifts.topk(many).values[-1]) if len(shifts) >= 2 * FEWEST else 0.0


def _only(shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of every row; empty where there are several."""
    return next(iter(shapes)) if len(shapes) == 1 else ()
