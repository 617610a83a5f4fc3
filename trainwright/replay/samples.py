"""What the recorded steps were fed, read from their programs: inputs, the targets of the loss, pooled samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.recorder.program import Call, Operation, RecordedStep, constants_of, mapped
from trainwright.replay.classified import CHUNKED, CLASSIFYING, classes_in
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

AGAINST = CLASSIFYING | {
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
}  # fmt: skip
"""Torch functions that hold a prediction against a target."""
MOST_SAMPLES = 2048


@dataclass
class Judged:
    """A call of a loss function: what was wanted, and of how many classes, if of classes."""

    name: str
    target: Tensor
    classes: int | None


@dataclass
class Samples:
    """Inputs and targets of several recorded steps, one row each; ``at`` maps where each tensor lies to its rows."""

    x: Tensor
    y: Tensor
    at: dict[int, tuple[int, int]]


def judged(bench: ReplaySession) -> list[Judged]:
    """What the losses of the step were told, also within the model."""
    found: list[Judged] = []

    def around(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name in AGAINST:
            target = args[2] if name == CHUNKED else (dict(zip(("input", "target"), args)) | kwargs)["target"]
            found.append(Judged(name, target.detach(), classes_in(name, args, kwargs)))
        return function(*args, **kwargs)

    bench.run(Intervention(ops=around), upto="forward")
    return found


def inputs_of(segment: RecordedStep) -> list[Tensor]:
    """What the first forward call was given, if it has a first dimension of samples."""
    call = next((each for each in segment.program if isinstance(each, Call)), None)
    tensors = [] if call is None else [c.tensor for c in constants_of((call.args, call.kwargs)) if c.is_unchanged]
    return [t for t in tensors if t.dim() and t.shape[0] == tensors[0].shape[0]]


def classes_of(bench: ReplaySession) -> tuple[int | None, Tensor | None]:
    """How many classes the loss tells apart, and the target of each sample if each has one."""
    for each in judged(bench):
        if each.name in CLASSIFYING and not each.target.is_floating_point():
            target = each.target if each.target.dim() == 1 and len(each.target) == bench.size else None
            return each.classes, target
    return None, None


def pooled(bench: ReplaySession, target: Tensor) -> Samples | None:
    """The samples of all recorded steps that were fed and judged like this one, each once if their ids are known.

    Only for steps of one forward call with one tensor as input, and a target that came from outside.
    """
    place = _place_of(bench.segment, target)
    parts: list[tuple[Tensor, Tensor]] = []
    at: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    total = 0
    for segment in reversed(bench.recorded):
        inputs, targets = inputs_of(segment), _loss_constants(segment)
        if place is None or len(segment.calls) != 1 or len(inputs) != 1 or len(targets) <= place:
            continue
        x, y = inputs[0], targets[place]
        if len(x) != y.numel() or x.shape[1:] != inputs_of(bench.segment)[0].shape[1:]:
            continue
        ids = segment.ids[0] if segment.ids else None
        if ids is not None and not seen.isdisjoint(ids):
            continue
        seen.update(ids or ())
        at[x.data_ptr()] = at[y.data_ptr()] = (total, total + len(x))
        parts.append((x.detach(), y.detach().flatten()))
        total += len(x)
        if total >= MOST_SAMPLES:
            break
    return Samples(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), at) if parts else None


def _loss_constants(segment: RecordedStep) -> list[Tensor]:
    operations = [each for each in segment.program if isinstance(each, Operation)]
    return [c.tensor for o in operations for c in constants_of((o.args, o.kwargs)) if not c.tensor.requires_grad]


def _place_of(segment: RecordedStep, target: Tensor) -> int | None:
    flat = target.flatten()
    for place, tensor in enumerate(_loss_constants(segment)):
        if tensor.numel() == len(flat) and tensor.dtype == target.dtype and torch.equal(tensor.flatten(), flat):
            return place
    return None


def standardised(number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """For ``Intervention.inputs``: floating-point inputs with mean 0 and deviation 1, by column or channel."""
    return mapped(args, _standard), mapped(kwargs, _standard)


def _standard(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2 or len(leaf) < 2:
        return leaf
    dims = [0] if leaf.dim() == 2 else [d for d in range(leaf.dim()) if d != 1 or leaf.dim() == 3]
    wide = leaf.double()
    mean, std = wide.mean(dims, keepdim=True), wide.std(dims, keepdim=True, correction=0)
    overall = wide.std(correction=0)
    flat = std <= 1e-3 * overall  # a column that says next to nothing is not blown up
    return ((wide - mean) / torch.where(flat, overall.clamp(min=1e-30), std)).to(leaf.dtype)
