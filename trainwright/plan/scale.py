"""Predicts the step of any micro-batch size from traces of two small ones: bytes and FLOPs are linear in the samples.

Holds for models whose operators do not change with the number of samples. The traces should have 2 samples or more:
with one, some copies become views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from trainwright.plan.call_trace import KINDS, Kind, Moment, Phase, Trace, Work

PASSES: tuple[Phase, ...] = ("forward", "checkpointing", "backward")
Line = tuple[float, float]
"""An affine function of the samples: (bytes at zero samples, bytes for each sample)."""


@dataclass(frozen=True)
class Scaled:
    """One step of one model for any micro-batch and accumulation. Both traces are of one micro-batch a step."""

    small: Trace
    large: Trace
    sizes: tuple[int, int]

    def at(self, micro: int, accumulation: int) -> Trace:
        """Return the trace of a step with micro-batches of ``micro`` samples.

        It contains the first micro-batch and, with accumulation, one of the others.
        """
        moments = [
            replace(
                one, held={kind: self._between(one.held.get(kind, 0), two.held.get(kind, 0), micro) for kind in KINDS}
            )
            for one, two in self._pairs
        ]
        kept = {
            path: self._between(size, self.large.kept.get(path, size), micro) for path, size in self.small.kept.items()
        }
        trace = replace(self.small, moments=tuple(moments), kept=kept, work=tuple(self._work(micro)))
        return accumulate(trace, accumulation)

    def peak_bytes(self, micro: int, accumulation: int) -> int:
        """Return the peak of ``at(micro, accumulation)``, computed faster."""
        lines = self._hull_again if accumulation > 1 else self._hull_once
        more = (accumulation - 1) * self._between(_inputs(self.small), _inputs(self.large), micro)
        return round(max(fixed + each * micro for fixed, each in lines)) + more

    @cached_property
    def distinct(self) -> Mapping[tuple[Phase, str, Line, Line, Line], int]:
        """The count of each kind of work. A kind is phase, dtype, and the lines of calls, FLOPs and bytes."""
        return Counter(
            (
                one.phase,
                one.dtype,
                self._line(one.calls, two.calls),
                self._line(one.flops, two.flops),
                self._line(one.bytes, two.bytes),
            )
            for one, two in self._work_pairs
        )

    @cached_property
    def _hull_once(self) -> list[Line]:
        return hull(self._line(one.total, two.total) for one, two in self._pairs)

    @cached_property
    def _hull_again(self) -> list[Line]:
        """The hull of a step with accumulation. The inputs of the additional micro-batches are not included."""
        of_one = accumulate(replace(self.small, moments=tuple(one for one, _ in self._pairs)), 2)
        of_two = accumulate(replace(self.large, moments=tuple(two for _, two in self._pairs)), 2)
        lines = [self._line(one.total, two.total) for one, two in zip(of_one.moments, of_two.moments, strict=True)]
        fixed, each = self._line(_inputs(self.small), _inputs(self.large))
        return hull((a - fixed, b - each) for a, b in lines)

    @cached_property
    def _pairs(self) -> list[tuple[Moment, Moment]]:
        """The moments of both traces in pairs.

        If the operators of the traces differ, as with a loss in chunks, the peaks of stretches in one module are
        paired, or else the peaks of the phases.
        """
        for view in (list, _by_module, _by_phase):
            one, two = view(self.small.moments), view(self.large.moments)
            if _places(one) == _places(two) or view is _by_phase:
                break
        return list(zip(one, two, strict=True))

    @cached_property
    def _work_pairs(self) -> list[tuple[Work, Work]]:
        others = {(work.phase, work.module, work.op, work.dtype): work for work in self.large.work}
        return [(work, others.get((work.phase, work.module, work.op, work.dtype), work)) for work in self.small.work]

    def _work(self, micro: int) -> Iterator[Work]:
        for one, two in self._work_pairs:
            calls = self._between(one.calls, two.calls, micro)
            flops, size = self._between(one.flops, two.flops, micro), self._between(one.bytes, two.bytes, micro)
            yield replace(one, calls=calls, flops=flops, bytes=size)

    def _line(self, one: int, two: int) -> Line:
        each = (two - one) / (self.sizes[1] - self.sizes[0])
        return one - each * self.sizes[0], each

    def _between(self, one: int, two: int, micro: int) -> int:
        fixed, each = self._line(one, two)
        return max(0, round(fixed + each * micro))


def accumulate(trace: Trace, accumulation: int) -> Trace:
    """Return the trace of a step of ``accumulation`` micro-batches, from the trace of one micro-batch.

    From the second micro-batch on, the accumulated gradients stay while new ones are made and freed. All inputs are
    held from the start. ``moments`` has only one of these later, equal micro-batches; ``work`` has all.
    """
    if accumulation == 1:
        return trace
    inputs = (accumulation - 1) * _inputs(trace)
    passes = [moment for moment in trace.moments if moment.phase in PASSES]
    rest = [moment for moment in trace.moments if moment.phase not in PASSES]
    sums = max((moment.held.get("gradients", 0) for moment in passes), default=0)
    again, before = [], passes[0].held.get("gradients", 0) if passes else 0
    for moment in passes:
        now = moment.held.get("gradients", 0)
        new, before = max(0, now - before), now
        temporaries = moment.held.get("temporaries", 0) + new
        held: dict[Kind, int] = {**moment.held, "gradients": sums, "temporaries": temporaries}
        again.append(replace(moment, micro=accumulation - 1, held=held))
    moments = tuple(
        replace(each, held={**each.held, "inputs": each.held.get("inputs", 0) + inputs})
        for each in (*passes, *again, *rest)
    )
    work = []
    for each in trace.work:
        times = accumulation if each.phase in PASSES else 1
        work.append(replace(each, calls=each.calls * times, flops=each.flops * times, bytes=each.bytes * times))
    adding = Work("backward", "", "add_", "float32", accumulation - 1, 0, 3 * sums * (accumulation - 1))
    return replace(trace, moments=moments, work=(*work, adding))


def tidy(trace: Trace) -> Trace:
    """Assign the moments after the last backward pass, such as the norm of the gradients, to the update."""
    last = max((i for i, moment in enumerate(trace.moments) if moment.phase == "backward"), default=len(trace.moments))
    rest = (replace(moment, phase="update") for moment in trace.moments[last + 1 :])
    return replace(trace, moments=(*trace.moments[: last + 1], *rest))


def hull(lines: Iterable[Line]) -> list[Line]:
    """Return the upper envelope of the lines from 0 samples on, by rising slope."""
    kept: list[Line] = []
    for fixed, each in sorted(set(lines), key=lambda line: (line[1], line[0])):
        while kept and kept[-1][0] <= fixed:
            kept.pop()
        while len(kept) > 1 and _meet(kept[-2], (fixed, each)) <= _meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append((fixed, each))
    return kept


def _meet(flat: Line, steep: Line) -> float:
    return (flat[0] - steep[0]) / (steep[1] - flat[1])


def _places(moments: Sequence[Moment]) -> list[tuple[str, str]]:
    return [(moment.phase, moment.module) for moment in moments]


def _by_module(moments: Sequence[Moment]) -> list[Moment]:
    """Return the peak and the last moment of each stretch in one module."""
    found = []
    for _, stretch in groupby(moments, key=lambda moment: (moment.phase, moment.micro, moment.module)):
        inside = list(stretch)
        found += [max(inside, key=lambda moment: moment.total), inside[-1]]
    return found


def _by_phase(moments: Sequence[Moment]) -> list[Moment]:
    """Return the peak of each phase (the first moment of all if it has none), then the last moment of all."""
    found = []
    for phase in (*PASSES, "update"):
        of_phase = [moment for moment in moments if moment.phase == phase]
        found.append(max(of_phase, key=lambda moment: moment.total) if of_phase else moments[0])
    return [*found, moments[-1]]


def _inputs(trace: Trace) -> int:
    return trace.resident.get("inputs", 0)
