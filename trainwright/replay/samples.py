"""The data of recorded steps, read from their programs: inputs, the targets of the loss, pooled samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import Call, Operation, RecordedStep, constants_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import CHUNKED, CLASSIFYING, classes_in
from trainwright.replay.functions import InputHandler, change_leaves, function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

COMPARING_FUNCTIONS = CLASSIFYING | {
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
}  # fmt: skip
"""Torch functions that compare a prediction with a target."""
MAX_SAMPLES = 2048


@dataclass
class RecordedLoss:
    """A call of a loss function. ``classes`` is None if the targets are no classes."""

    name: str
    target: Tensor
    classes: int | None


@dataclass
class Samples:
    """Inputs and targets of several recorded steps, one row per sample.

    ``at`` maps the data pointer of a recorded input or target to its rows (first, after the last).
    """

    x: Tensor
    y: Tensor
    at: dict[int, tuple[int, int]]


def losses_of(session: ReplaySession) -> list[RecordedLoss]:
    """Returns the calls of loss functions in the step, including those inside the model."""
    calls: list[RecordedLoss] = []

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function)
        if name in COMPARING_FUNCTIONS:
            target = args[2] if name == CHUNKED else (dict(zip(("input", "target"), args)) | kwargs)["target"]
            calls.append(RecordedLoss(name, target.detach(), classes_in(name, args, kwargs)))
        return function(*args, **kwargs)

    session.run(Intervention(ops=collect), upto="forward")
    return calls


def inputs_of(recorded: RecordedStep) -> list[Tensor]:
    """Returns the tensors of the first forward call whose first dimension is the batch."""
    call = next((each for each in recorded.program if isinstance(each, Call)), None)
    constants = [] if call is None else constants_of((call.args, call.kwargs))
    tensors = plain(each.tensor for each in constants if each.is_unchanged)
    return [t for t in tensors if t.dim() and t.shape[0] == tensors[0].shape[0]]


def on_column(column: int, change: Callable[[Tensor], Tensor]) -> InputHandler:
    """Returns a handler that applies ``change`` to one column, shape (rows,), of the flattened inputs."""

    def changed(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2 or leaf[0].numel() <= column:
            return leaf
        flat = leaf.flatten(1).clone()
        flat[:, column] = change(flat[:, column])
        return flat.view(leaf.shape)

    return change_leaves(changed)


def classes_of(session: ReplaySession) -> tuple[int | None, Tensor | None]:
    """Returns the number of classes of the loss, and the target of each sample if each has exactly one."""
    for each in losses_of(session):
        if each.name in CLASSIFYING and not each.target.is_floating_point():
            target = each.target if each.target.dim() == 1 and len(each.target) == session.size else None
            return each.classes, target
    return None, None


def pooled(session: ReplaySession, target: Tensor) -> Samples | None:
    """Returns the samples of all recorded steps with similar inputs and targets, each once if their ids are known.

    Only for steps of one forward call with one input tensor, and a target from the batch.
    """
    place = _place_of(session.recorded_step, target)
    parts: list[tuple[Tensor, Tensor]] = []
    at: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    total = 0
    for recorded in reversed(session.recorded_steps):
        inputs, targets = inputs_of(recorded), _loss_constants(recorded)
        if place is None or len(recorded.calls) != 1 or len(inputs) != 1 or len(targets) <= place:
            continue
        x, y = inputs[0], targets[place]
        if len(x) != y.numel() or x.shape[1:] != inputs_of(session.recorded_step)[0].shape[1:]:
            continue
        ids = recorded.ids[0] if recorded.ids else None
        if ids is not None and not seen.isdisjoint(ids):
            continue
        seen.update(ids or ())
        at[x.data_ptr()] = at[y.data_ptr()] = (total, total + len(x))
        parts.append((x.detach(), y.detach().flatten()))
        total += len(x)
        if total >= MAX_SAMPLES:
            break
    return Samples(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), at) if parts else None


def _loss_constants(recorded: RecordedStep) -> list[Tensor]:
    operations = [each for each in recorded.program if isinstance(each, Operation)]
    return [c.tensor for o in operations for c in constants_of((o.args, o.kwargs)) if not c.tensor.requires_grad]


def _place_of(recorded: RecordedStep, target: Tensor) -> int | None:
    flat = target.flatten()
    for place, tensor in enumerate(_loss_constants(recorded)):
        if tensor.numel() == len(flat) and tensor.dtype == target.dtype and torch.equal(tensor.flatten(), flat):
            return place
    return None


def _standardise(leaf: object) -> object:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2 or len(leaf) < 2:
        return leaf
    dims = [0] if leaf.dim() == 2 else [d for d in range(leaf.dim()) if d != 1 or leaf.dim() == 3]
    wide = leaf.double()
    mean, std = wide.mean(dims, keepdim=True), wide.std(dims, keepdim=True, correction=0)
    overall = wide.std(correction=0)
    flat = std <= 1e-3 * overall  # a nearly constant column is not amplified
    return ((wide - mean) / torch.where(flat, overall.clamp(min=1e-30), std)).to(leaf.dtype)


standardised: InputHandler = change_leaves(_standardise)
"""For ``Intervention.inputs``: floating-point inputs with mean 0 and standard deviation 1, by column or channel."""
