"""How a step accumulates gradients: the weight of each micro-batch, and how many elements it counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from trainwright.doctor.update.measure.rates import norm_of
from trainwright.recorder.program import (
    Backward,
    Call,
    Constant,
    Instruction,
    Operation,
    OptimizerStep,
    ZeroGrad,
    constants_of,
)
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import classified
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

MAX_MICRO_BATCHES = 16
"""The most micro-batches that are run one by one."""


@dataclass
class _Mean:
    """A mean over ``count`` elements (None: not known). ``weight`` is its gradient."""

    count: float | None
    weight: float | None = None

    def take(self, gradient: Tensor) -> None:
        """Hooked on the value that a function returned: what is done to it in place does not change its gradient."""
        self.weight = float(gradient) + (self.weight or 0.0)


@dataclass
class _Means:
    """Collects the means that the loss is made of, by forward call, from the torch functions of a replay."""

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
        else:
            is_mean, count = self._count(name, args, kwargs)
            if is_mean:
                mean = _Mean(count)
                result.register_hook(mean.take)  # type: ignore[no-untyped-call]
                self.by_call[-1].append(mean)
        return result

    def _count(self, name: str, args: Args, kwargs: Kwargs) -> tuple[bool, float | None]:
        """Whether this function returned a mean, and over how many elements."""
        if name.strip("_") in ("div", "true_divide", "truediv", "itruediv") and len(args) > 1:
            divisor, summed = args[1], self._sums.get(id(args[0]))
            if summed is None or not isinstance(divisor, Tensor) or divisor.dim() or divisor.requires_grad:
                return False, None
            return float(divisor) <= 1.1 * summed, float(divisor)  # a larger one counts all micro-batches
        if name == "mean":
            return True, float(args[0].numel())
        if not (name.endswith("_loss") or name.startswith(("cross_entropy", "binary_cross_entropy"))):
            return False, None
        if kwargs.get("reduction", "mean") != "mean":
            return False, None
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if (of_classes := classified(name, args, kwargs)) is not None:
            return True, float(of_classes.count)
        return True, float(target.numel()) if isinstance(target, Tensor) else None


@experiment("accumulation", when="checkup", steps=0.0)
def accumulation(session: ReplaySession) -> Facts:
    """For a step of several backward passes: whether each has its own batch, the weight and the count of each."""
    backwards = [each for each in session.recorded_step.program if isinstance(each, Backward)]
    facts: Facts = {"backwards": len(backwards)}
    calls = session.recorded_step.calls
    if len(backwards) < 2 or len(calls) != len(backwards) or len({call.root for call in calls}) > 1:
        return facts
    if any(isinstance(each, OptimizerStep) for part in list(_parts(session))[1:] for each in part):
        return facts  # an update lies between them
    means = _Means()
    result = session.run(Intervention(inputs=means.start_call, ops=means.collect), upto="step")
    facts["distinct"] = _distinct(session)
    facts["weights"], facts["counts"] = [], []
    for found, backward in zip(means.by_call, backwards):
        weighed = [(m.weight / backward.scale, m.count) for m in found if m.weight is not None]
        weight, count = max(weighed, key=lambda each: abs(each[0]), default=(None, None))
        facts["weights"].append(weight)
        facts["counts"].append(count)
    facts["same_functions"] = len({tuple(names) for names in _functions(session)}) == 1
    facts["discarded"] = _discarded(session)
    facts["used_by_hand"] = "used_by_hand" in session.recorded_step.values
    recorded = session.recorded_step.grad_norm
    facts["norm_then"], facts["norm_now"] = None if recorded is None else float(recorded), result.grad_norm
    return facts


def _parts(session: ReplaySession) -> Iterator[list[Instruction]]:
    """The program in parts, each of which ends with a backward pass."""
    part: list[Instruction] = []
    for each in session.recorded_step.program:
        part.append(each)
        if isinstance(each, Backward):
            yield part
            part = []


def _distinct(session: ReplaySession) -> bool:
    """Whether all micro-batches differ: by the sample ids of the loader, otherwise by their tensors."""
    ids = session.ids
    parts = list(_parts(session))
    if ids and len(ids) != len(parts):
        return False
    if ids and all(each is not None for each in ids):
        return len({i for each in ids for i in each or ()}) == sum(len(each or ()) for each in ids)
    seen: set[tuple[int, int]] = set()
    for part in parts:
        tensors = [c.tensor for each in part if isinstance(each, Call | Operation) for c in _batch(each, session)]
        here = {(t.data_ptr(), t.numel()) for t in tensors}
        if seen & here:
            return False
        seen |= here
    return True


def _batch(each: Call | Operation, session: ReplaySession) -> list[Constant]:
    """The tensors whose first dimension is that of the batch."""
    found = [c for c in constants_of((each.args, each.kwargs)) if not isinstance(c.tensor, nn.Parameter)]
    return [c for c in found if c.tensor.dim() and c.tensor.shape[0] == session.size]


def _functions(session: ReplaySession) -> list[list[str]]:
    return [[each.name for each in part if isinstance(each, Operation)] for part in _parts(session)]


def _discarded(session: ReplaySession) -> int:
    """The number of backward passes whose gradients are zeroed before the update, but for those that have to be.

    Gradients that are not finite are dropped by every loop that scales its loss by hand.
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
    return sum(_is_finite(session.run(Intervention(micro=[each])).grads.values()) for each in lost)


def _is_finite(gradients: Iterable[Tensor | None]) -> bool:
    return all(bool(g.isfinite().all()) for g in gradients if g is not None)


@experiment("token_weights", when="requested", steps=6.0)
def token_weights(session: ReplaySession) -> Facts:
    """Compares the gradient of the step with that of its micro-batches weighted by their counts."""
    counts = accumulation(session).get("counts") or []
    if not 2 <= len(counts) <= MAX_MICRO_BATCHES or any(not count for count in counts):
        return {}
    shares = [count / sum(counts) for count in counts]
    equal: dict[str, Tensor] = {}
    by_count: dict[str, Tensor] = {}
    losses = []
    for number, share in enumerate(shares):
        result = session.run(Intervention(micro=[number]))
        losses.append(result.loss)
        for name, grad in result.grads.items():
            if grad is not None:
                weighted = grad * share * len(shares)
                equal[name] = equal[name] + grad if name in equal else grad
                by_count[name] = by_count[name] + weighted if name in by_count else weighted
    off = {name: equal[name] - by_count[name] for name in equal}
    return {
        "counts": counts,
        "off": norm_of(off, list(off)) / max(norm_of(by_count, list(off)), 1e-30),
        "loss": sum(losses) / len(losses),
        "loss_by_count": sum(loss * share for loss, share in zip(losses, shares)),
    }
