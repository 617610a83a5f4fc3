"""How the micro-batches of a step are put together: what weight each has, and how much it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trainwright.recorder.program import Backward, Call, Constant, Operation, OptimizerStep, ZeroGrad, constants_of
from trainwright.replay.classified import classified
from trainwright.replay.experiments import experiment
from trainwright.replay.experiments.optim import norm_of
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

AT_MOST = 16
"""Micro-batches that are run one by one."""


@dataclass
class _Mean:
    """A 0-d tensor that is a mean over ``count`` elements (None: not known); its gradient is its weight."""

    value: Tensor
    count: float | None


@dataclass
class _Means:
    """Watches the torch functions of a replay for means that the loss is made of, by forward call."""

    by_call: list[list[_Mean]] = field(default_factory=list)
    _sums: dict[int, int] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)

    def called(self, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.by_call.append([])
        return args, kwargs

    def around(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dim() or not result.requires_grad or not self.by_call:
            return result
        name = getattr(function, "__name__", "")
        of_classes = classified(name, args, kwargs)
        if name == "sum" or (of_classes is not None and of_classes.is_sum):
            self._sums[id(result)] = of_classes.count if of_classes else int((args[0].detach() != 0).sum())
            self._kept.append(result)
        elif (is_mean := self._count(name, args, kwargs))[0]:
            result.retain_grad()
            self.by_call[-1].append(_Mean(result, is_mean[1]))
        return result

    def _count(self, name: str, args: Any, kwargs: Any) -> tuple[bool, float | None]:
        """Whether this is a mean, and over how many."""
        if name in ("div", "true_divide", "__truediv__") and len(args) > 1:
            below, summed = args[1], self._sums.get(id(args[0]))
            if summed is None or not isinstance(below, Tensor) or below.dim() or below.requires_grad:
                return False, None
            return float(below) <= 1.1 * summed, float(below)  # else by a count of all micro-batches
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


@experiment("accumulation", when="checkup")
def accumulation(bench: ReplaySession) -> dict[str, Any]:
    """For a step of several backward passes: whether each has a batch of its own, its weight, and its count."""
    backwards = [each for each in bench.segment.program if isinstance(each, Backward)]
    told: dict[str, Any] = {"backwards": len(backwards)}
    calls = bench.segment.calls
    if len(backwards) < 2 or len(calls) != len(backwards) or len({call.root for call in calls}) > 1:
        return told
    if any(isinstance(each, OptimizerStep) for part in list(_parts(bench))[1:] for each in part):
        return told  # an update lies between them
    means = _Means()
    played = bench.run(Intervention(inputs=means.called, ops=means.around), upto="step")
    told["distinct"] = _distinct(bench)
    told["losses"] = [float(each) for each in played.losses]
    told["weights"], told["counts"] = [], []
    for found, backward in zip(means.by_call, backwards):
        weighed = [(float(m.value.grad) / backward.scale, m.count) for m in found if m.value.grad is not None]
        weight, count = max(weighed, key=lambda each: abs(each[0]), default=(None, None))
        told["weights"].append(weight)
        told["counts"].append(count)
    told["same_functions"] = len({tuple(names) for names in _functions(bench)}) == 1
    told["discarded"] = _discarded(bench)
    then = bench.segment.grad_norm
    told["norm_then"], told["norm_now"] = None if then is None else float(then), played.grad_norm
    return told


def _parts(bench: ReplaySession) -> Iterator[list[Any]]:
    """The program from backward pass to backward pass."""
    part: list[Any] = []
    for each in bench.segment.program:
        part.append(each)
        if isinstance(each, Backward):
            yield part
            part = []


def _distinct(bench: ReplaySession) -> bool:
    """Whether no two micro-batches share a batch: by the ids of the loader, else by the tensors they are made of."""
    ids = bench.ids
    parts = list(_parts(bench))
    if ids and len(ids) != len(parts):
        return False
    if ids and all(each is not None for each in ids):
        return len({i for each in ids for i in each or ()}) == sum(len(each or ()) for each in ids)
    seen: set[tuple[int, int]] = set()
    for part in parts:
        tensors = [c.tensor for each in part if isinstance(each, Call | Operation) for c in _batch(each, bench)]
        here = {(t.data_ptr(), t.numel()) for t in tensors}
        if seen & here:
            return False
        seen |= here
    return True


def _batch(each: Call | Operation, bench: ReplaySession) -> list[Constant]:
    """The tensors that have as many rows as the batch."""
    found = [c for c in constants_of((each.args, each.kwargs)) if not isinstance(c.tensor, nn.Parameter)]
    return [c for c in found if c.tensor.dim() and c.tensor.shape[0] == bench.size]


def _functions(bench: ReplaySession) -> list[list[str]]:
    return [[each.name for each in part if isinstance(each, Operation)] for part in _parts(bench)]


def _discarded(bench: ReplaySession) -> int:
    """Backward passes whose gradients are dropped before the update."""
    lost = since = 0
    for each in bench.segment.program:
        if isinstance(each, Backward):
            since += 1
        elif isinstance(each, ZeroGrad):
            lost, since = lost + since, 0
    return lost if since else 0


@experiment("token_weights", when="asked")
def token_weights(bench: ReplaySession) -> dict[str, Any]:
    """The gradient of the step against that of the same micro-batches, each weighed by how much it counts."""
    counts = accumulation(bench).get("counts") or []
    if not 2 <= len(counts) <= AT_MOST or any(not count for count in counts):
        return {}
    share = [count / sum(counts) for count in counts]
    equal: dict[str, Any] = {}
    by_count: dict[str, Any] = {}
    losses = []
    for number, part in enumerate(share):
        played = bench.run(Intervention(micro=[number]))
        losses.append(played.loss)
        for name, grad in played.grads.items():
            if grad is not None:
                equal[name] = equal.get(name, 0) + grad
                by_count[name] = by_count.get(name, 0) + grad * part * len(share)
    off = {name: equal[name] - by_count[name] for name in equal}
    return {
        "counts": counts,
        "off": norm_of(off, list(off)) / max(norm_of(by_count, list(off)), 1e-30),
        "loss": sum(losses) / len(losses),
        "loss_by_count": sum(loss * part for loss, part in zip(losses, share)),
    }
