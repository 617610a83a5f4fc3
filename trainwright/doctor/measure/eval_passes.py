"""Forward passes of a step in eval mode, and how far their outputs are apart."""

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
from trainwright.replay.functions import InputHandler, change_leaves
from trainwright.replay.replayer import AS_IT_WAS, Intervention
from trainwright.replay.session import ReplaySession

ROOM = 16
"""Times the step's own noise that is still rounding: another order of summation, once for each layer in a row."""
Outputs = Sequence[Tensor]


CLEAR = 100
"""Times the limit: what is so far off is no rounding, and is not computed again in float64."""
SHRUNK = 0.1
"""Of what it was: rounding is 1e-9 of it in float64, and what a model does is as large as before."""


class EvalPasses:
    """The passes of one step. ``limit`` is how far outputs may be apart by rounding, in their standard deviations.

    It is taken from the step itself: from weights that differ in their last bit, and the precision of the outputs.
    """

    def __init__(self, session: ReplaySession, dtype: Literal["fp64"] | None = None) -> None:
        self.session, self._dtype = session, dtype
        self.base = self.run()
        moved = self.run(Intervention(model=self._jittered))
        self.limit = ROOM * (apart(self.base, moved) + self._eps())

    def run(self, change: Intervention = AS_IT_WAS) -> Outputs:
        """The outputs of all models. Raises what the model raises."""
        result = self.session.run(replace(change, mode="eval", dtype=self._dtype), upto="forward")
        wanted = len(self.session.recorded_step.calls)
        if result.error is not None and len(result.outputs) < wanted:
            raise result.error
        return numbers_of(result.outputs)

    def _eps(self) -> float:
        """Of the coarsest type that the outputs are computed in."""
        types = [t.dtype for t in (*self.base, *self.session.replayer.subject.parameters) if t.is_floating_point()]
        types += [each.autocast[1] for each in self.session.recorded_step.calls if each.autocast[0]]
        return max((torch.finfo(each).eps for each in types), default=1e-7)

    @contextmanager
    def _jittered(self) -> Iterator[None]:
        """Inside, weights differ by one unit in the last place. Within ``stage`` they are copies."""
        generator, eps = torch.Generator().manual_seed(0), self._eps()
        for p in self.session.replayer.subject.parameters:
            if p.is_floating_point():
                signs = torch.randint(2, p.shape, generator=generator, device="cpu").to(p) * 2 - 1
                p.data.mul_(1 + eps * signs)
        yield

    def confirmed(self, measure: Callable[[EvalPasses], Deviation | None]) -> Deviation | None:
        """What ``measure`` finds; where it is near the limit and far less in float64, nothing: it was rounding."""
        found = measure(self)
        if found is None or not found.is_real or found.amount > CLEAR * found.limit:
            return found
        try:
            wide = measure(EvalPasses(self.session, "fp64"))
        except (RuntimeError, TypeError, NotImplementedError):  # a part of the model insists on its dtype
            return found
        amount = 0.0 if wide is None else wide.amount
        return found if amount > SHRUNK * found.amount else replace(found, amount=amount)

    def deviation(self, changed: Outputs, compare: Compare | None = None) -> Deviation:
        """How far ``changed`` is from the base."""
        return Deviation(apart(self.base, changed, compare), self.limit)

    def located(self, deviation: Deviation, change: Intervention, compare: Compare | None = None) -> Deviation:
        """The same with the first module that differs, found by two more passes, where it is no rounding."""
        if not deviation.is_real:
            return deviation
        traces = CallTrace(self.session), CallTrace(self.session)
        for trace, each in zip(traces, (AS_IT_WAS, change)):
            self.run(replace(each, model=trace.following))
        module = traces[0].first_difference(traces[1], compare or distance, self.limit)
        return replace(deviation, module=module)


def numbers_of(value: object) -> list[Tensor]:
    """The tensors of floating-point numbers in it; complex numbers are two each."""
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in plain(tensors_of(value))]
    return [t for t in tensors if t.is_floating_point()]


def apart(ones: Outputs, others: Outputs, compare: Compare | None = None) -> float:
    """The largest distance of two lists of outputs."""
    pairs = [(a, b) for a, b in zip(ones, others)]
    return max(((compare or distance)(a, b) for a, b in pairs), default=0.0)


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors of one shape, in standard deviations of the first; else 0."""
    if one.shape != other.shape or not one.numel():
        return 0.0
    wide = one.double()
    return float((wide - other.double()).abs().nan_to_num().max() / spread(wide))


def spread(wide: Tensor) -> Tensor:
    """The standard deviation of what is finite, at least a trifle of its size; of one number its size."""
    finite = wide[wide.isfinite()]
    if finite.numel() < 2:
        return finite.abs().sum() + 1e-12
    return finite.std() + 1e-12 + 1e-7 * finite.abs().max()


def at_rows(chosen: Callable[[int], Tensor], size: int, dim: int = 0) -> Compare:
    """Compares only what belongs to the samples ``chosen(size)``, a mask, along the dimension of that size.

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


def in_place_of(x: Tensor, other: Tensor) -> InputHandler:
    """For ``Intervention.inputs``: ``other`` where the model is given ``x``."""
    return change_leaves(lambda leaf: other if leaf is x else leaf)
