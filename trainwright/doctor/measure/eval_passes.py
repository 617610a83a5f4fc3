"""Forward passes of a step in eval mode, and the distances between their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from trainwright.doctor.facts.function import Deviation
from trainwright.doctor.measure.locate import CallTrace, Compare
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import tensors_of
from trainwright.replay.replayer import UNCHANGED, Intervention
from trainwright.replay.session import ReplaySession

NOISE_MULTIPLE = 16
"""Multiple of the step's numerical noise that still counts as rounding. Layers in sequence each add some."""
Outputs = Sequence[Tensor]


MAX_CONFIRMED_RATIO = 100
"""Deviations above this multiple of the limit are not confirmed in float64."""
ROUNDING_SHRINKAGE = 0.1
"""A deviation that shrinks below this fraction in float64 is rounding. A real one keeps its size."""


class EvalPasses:
    """The passes of one step. ``limit`` is the largest distance that rounding explains, in standard deviations.

    The limit is measured on the step itself, with weights that differ in their last bit, and with the precision of the
    outputs.
    """

    def __init__(self, session: ReplaySession, dtype: Literal["fp64"] | None = None) -> None:
        self.session, self._dtype = session, dtype
        self.base = self.run()
        moved = self.run(Intervention(model=self._jittered))
        self.limit = NOISE_MULTIPLE * (max_distance(self.base, moved) + self._eps())

    def run(self, change: Intervention = UNCHANGED) -> Outputs:
        """Returns the outputs of all models. Raises the error of the model."""
        result = self.session.run(replace(change, mode="eval", dtype=self._dtype), upto="forward")
        wanted = len(self.session.recorded_step.calls)
        if result.error is not None and len(result.outputs) < wanted:
            raise result.error
        return numbers_of(result.outputs)

    def _eps(self) -> float:
        """Returns the machine epsilon of the coarsest dtype that the outputs are computed in."""
        types = [t.dtype for t in (*self.base, *self.session.replayer.subject.parameters) if t.is_floating_point()]
        types += [each.autocast[1] for each in self.session.recorded_step.calls if each.autocast[0]]
        return max((torch.finfo(each).eps for each in types), default=1e-7)

    @contextmanager
    def _jittered(self) -> Iterator[None]:
        """Context in which weights differ by one unit in the last place. Within ``stage`` they are copies."""
        generator, eps = torch.Generator().manual_seed(0), self._eps()
        for p in self.session.replayer.subject.parameters:
            if p.is_floating_point():
                signs = torch.randint(2, p.shape, generator=generator, device="cpu").to(p) * 2 - 1
                p.data.mul_(1 + eps * signs)
        yield

    def confirmed(self, measure: Callable[[EvalPasses], Deviation | None]) -> Deviation | None:
        """Returns the result of ``measure``; reduced if the deviation is small and shrinks in float64, because it is
        rounding.
        """
        found = measure(self)
        if found is None or not found.is_real or found.amount > MAX_CONFIRMED_RATIO * found.limit:
            return found
        try:
            wide = measure(EvalPasses(self.session, "fp64"))
        except (RuntimeError, TypeError, NotImplementedError):  # a part of the model requires its dtype
            return found
        amount = 0.0 if wide is None else wide.amount
        return found if amount > ROUNDING_SHRINKAGE * found.amount else replace(found, amount=amount)

    def deviation(self, changed: Outputs, compare: Compare | None = None) -> Deviation:
        """Returns the distance of ``changed`` from the base."""
        return Deviation(max_distance(self.base, changed, compare), self.limit)

    def located(self, deviation: Deviation, change: Intervention, compare: Compare | None = None) -> Deviation:
        """Adds the first module that differs, found by two more passes, to a deviation above the limit."""
        if not deviation.is_real:
            return deviation
        traces = CallTrace(self.session), CallTrace(self.session)
        for trace, each in zip(traces, (UNCHANGED, change)):
            self.run(replace(each, model=trace.following))
        module = traces[0].first_difference(traces[1], compare or distance, self.limit)
        return replace(deviation, module=module)


def numbers_of(value: object) -> list[Tensor]:
    """Returns the floating-point tensors in a value. Complex numbers become two numbers each."""
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in plain(tensors_of(value))]
    return [t for t in tensors if t.is_floating_point()]


def max_distance(ones: Outputs, others: Outputs, compare: Compare | None = None) -> float:
    """Returns the largest distance between two lists of outputs."""
    pairs = [(a, b) for a, b in zip(ones, others)]
    return max(((compare or distance)(a, b) for a, b in pairs), default=0.0)


def distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of two tensors, in standard deviations of the first; 0 if the shapes differ."""
    if one.shape != other.shape or not one.numel():
        return 0.0
    wide = one.double()
    return float((wide - other.double()).abs().nan_to_num().max() / spread(wide))


def spread(wide: Tensor) -> Tensor:
    """Returns the standard deviation of the finite values, with a small lower bound; for one number its size."""
    finite = wide[wide.isfinite()]
    if finite.numel() < 2:
        return finite.abs().sum() + 1e-12
    return finite.std() + 1e-12 + 1e-7 * finite.abs().max()


def at_rows(chosen: Callable[[int], Tensor], size: int, dim: int = 0) -> Compare:
    """Returns a comparison of the samples in the mask ``chosen(size)``, along the dimension of that size.

    Tensors in which no dimension, or more than one, has that size are not compared.
    """

    def compare(one: Tensor, other: Tensor) -> float:
        dims = [n for n, d in enumerate(one.shape) if d == size]
        if one.shape != other.shape or not dims or (len(dims) > 1 and dim not in dims):
            return 0.0
        at = dims[0] if len(dims) == 1 else dim
        rows = chosen(size).nonzero().flatten().to(one.device)
        delta = (one.double() - other.double()).index_select(at, rows).abs().nan_to_num()
        return float(delta.max() / spread(one.double())) if delta.numel() else 0.0

    return compare
