"""Measures gradient accumulation: the weight of each micro-batch and its number of elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from trainwright.doctor.facts.loss import AccumulationFacts
from trainwright.recorder.callers import frames
from trainwright.recorder.program import Backward, Call, Instruction, Operation, OptimizerStep, ZeroGrad, constants_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import classified
from trainwright.replay.experiments import replay
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

MAX_MICRO_BATCHES = 16  # If more micro-batches than this are dropped, they are not replayed one by one


@dataclass
class _Mean:
    """A mean over ``count`` elements (None: unknown). ``weight`` is the gradient with respect to it."""

    count: float | None
    fraction: float = 1.0  # below 1 for a sum that is divided by a larger number of elements than it has
    weight: float | None = None

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient. The hook is on the mean as it was returned, before any in-place change."""
        self.weight = float(gradient) * self.fraction + (self.weight or 0.0)


@dataclass
class _Means:
    """Collects the means that each forward call contributes to the loss."""

    by_call: list[list[_Mean]] = field(default_factory=list)
    _sums: dict[int, int] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)

    def start_call(self, number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self.by_call.append([])
        return args, kwargs

    def collect(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dim() or not result.requires_grad or not self.by_call:
            return result
        name = function_name(function)
        of_classes = classified(name, args, kwargs)
        if name == "sum" or (of_classes is not None and of_classes.is_sum):
            self._sums[id(result)] = of_classes.count if of_classes else int((args[0].detach() != 0).sum())
            self._kept.append(result)
        elif (mean := self._mean(name, args, kwargs)) is not None:
            result.register_hook(mean.add)  # type: ignore[no-untyped-call]
            self.by_call[-1].append(mean)
        return result

    def _mean(self, name: str, args: Args, kwargs: Kwargs) -> _Mean | None:
        """Returns the mean that a function returned; None if it returned none."""
        if name.strip("_") in ("div", "true_divide", "truediv", "itruediv") and len(args) > 1:
            divisor, summed = args[1], self._sums.get(id(args[0]))
            is_tensor = isinstance(divisor, Tensor)
            if summed is None or (is_tensor and (divisor.dim() or divisor.requires_grad)):
                return None
            if float(divisor) > 1.1 * summed:  # it counts masked elements, too, or the elements of all micro-batches
                return _Mean(float(summed), summed / float(divisor))
            return _Mean(float(divisor)) if is_tensor else None
        if name == "mean":
            return _Mean(float(args[0].numel()))
        is_loss = name.endswith("_loss") or name.startswith(("cross_entropy", "binary_cross_entropy"))
        if not is_loss or kwargs.get("reduction", "mean") != "mean":
            return None
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if (of_classes := classified(name, args, kwargs)) is not None:
            return _Mean(float(of_classes.count))
        return _Mean(float(target.numel()) if isinstance(target, Tensor) else None)


@replay(AccumulationFacts, when="checkup", steps=0.0)
def accumulation(session: ReplaySession) -> AccumulationFacts:
    """Returns the weight and element count of each micro-batch in a step with several backward passes."""
    step, calls = session.recorded_step, session.recorded_step.calls
    backwards = [each for each in step.program if isinstance(each, Backward)]
    parts = list(_parts(step.program))
    is_split = any(isinstance(each, OptimizerStep) for part in parts[1:] for each in part)
    several_roots = len({call.root for call in calls}) > 1
    if len(backwards) < 2 or len(calls) != len(backwards) or several_roots or is_split:
        return AccumulationFacts(len(backwards))
    means = _Means()
    result = session.run(Intervention(inputs=means.start_call, ops=means.collect), upto="step")
    found = [
        max(
            ((m.weight / b.scale, m.count, m.fraction) for m in of_call if m.weight is not None),
            key=lambda e: abs(e[0]),
            default=None,
        )
        for of_call, b in zip(means.by_call, backwards)
    ]
    if not 0.9 < sum(each[0] for each in found if each is not None) < 1.1:
        found = [each if each is None or each[2] == 1 else None for each in found]
    names = {tuple(each.name for each in part if isinstance(each, Operation)) for part in parts}
    norm = step.grad_norm
    return AccumulationFacts(
        backwards=len(backwards),
        is_plain=_are_distinct(session, parts) and len(names) == 1 and "used_by_hand" not in step.values,
        weights=tuple(None if each is None else each[0] for each in found),
        counts=tuple(None if each is None else each[1] for each in found),
        discarded=_discarded(session),
        norm_then=None if norm is None else float(norm),
        norm_now=result.grad_norm,
        of_transformers=any(each.f_globals.get("__name__") == "transformers.trainer" for each in frames()),
    )


def _parts(program: list[Instruction]) -> Iterator[list[Instruction]]:
    """Splits the program into parts that each end with a backward pass."""
    part: list[Instruction] = []
    for each in program:
        part.append(each)
        if isinstance(each, Backward):
            yield part
            part = []


def _are_distinct(session: ReplaySession, parts: list[list[Instruction]]) -> bool:
    """Returns True if all micro-batches differ, by the sample ids of the loader, else by their tensors."""
    ids = session.ids
    if ids and len(ids) != len(parts):
        return False
    if ids and all(each is not None for each in ids):
        return len({i for each in ids for i in each or ()}) == sum(len(each or ()) for each in ids)
    seen: set[tuple[int, int]] = set()
    for part in parts:
        constants = [c for i in part if isinstance(i, Call | Operation) for c in constants_of((i.args, i.kwargs))]
        tensors = [c.tensor for c in constants if not isinstance(c.tensor, nn.Parameter)]
        here = {(t.data_ptr(), t.numel()) for t in tensors if t.dim() and t.shape[0] == session.size}
        if seen & here:
            return False
        seen |= here
    return True


def _discarded(session: ReplaySession) -> int:
    """Returns the number of backward passes with finite gradients that are zeroed before the update.

    Backward passes with non-finite gradients are not counted: loops that scale the loss by hand drop them.
    """
    lost: list[int] = []
    since: list[int] = []
    number = 0
    for each in session.recorded_step.program:
        if isinstance(each, Backward):
            since.append(number)
            number += 1
        elif isinstance(each, ZeroGrad):
            lost, since = lost + since, []
    if not since or len(lost) > MAX_MICRO_BATCHES:
        return len(lost) if since else 0
    grads = [session.run(Intervention(micro=[each])).grads.values() for each in lost]
    return sum(all(bool(g.isfinite().all()) for g in each if g is not None) for each in grads)
