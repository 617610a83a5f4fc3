"""One optimizer step of our own engine under fake tensors, and what it held and did: a Trace."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from trainwright.build.checkpointing import apply_checkpointing
from trainwright.engine.clip import make_clip
from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.step import StepFn, make_step
from trainwright.errors import UsageError
from trainwright.forecast.fake_tensors import DeviceName, as_on_cuda, fake_tensors, forget_casts, simulated_device
from trainwright.forecast.hidden_memory import always
from trainwright.forecast.moments import kept, moments, reserved
from trainwright.forecast.tracker import Tracker
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.trace import Trace, Unseen
from trainwright.state.cursor import MicroBatch, StepBatch
from trainwright.state.rng import preserved_rng
from trainwright.state.train_state import TrainState

WHY_RESERVED = (
    "gaps in what the caching allocator keeps, by a simulation of it; short of memory, it gives most of them back"
)


@dataclass(frozen=True)
class TracedObjects:
    """What is trained, made under fake tensors on the simulated device.

    ``loss`` is ``(model, batch)`` or ``(output, target)``. Without an optimizer only the forward and backward passes
    are reported. ``micro`` is the data of one micro-batch; its first tensor's first dimension counts samples.
    """

    model: nn.Module
    loss: Callable[..., Loss | Tensor]
    optimizer: Optimizer | None
    micro: Any


def trace_step(
    make: Callable[[torch.device], TracedObjects],
    *,
    device: DeviceName,
    precision: PrecisionName = "fp32",
    accumulation: int = 1,
    recompute: Checkpointing | None = None,
    clip: bool = True,
) -> Trace:
    """What one step in the steady state holds and computes on ``device``, which need not be there.

    ``make`` is called under fake tensors, so it may build a model of any size; tensors that it makes lie on the device
    that it is given. One step is taken; the optimizer's state that it makes counts as there before. The process is left
    as it was (random numbers, default dtype, autocast), but for the stand-in for CUDA: see ``simulated_cuda``.

    Raises UsageError for a step that cannot be simulated, say as shapes depend on values, and whatever ``make`` raises.
    """
    place = simulated_device(device)
    with _undisturbed(), fake_tensors():
        with torch.device(place):
            subject = make(place)
        if recompute is not None:
            apply_checkpointing(subject.model, recompute)
        optimizer = subject.optimizer or _NoUpdate(subject.model)
        if device == "cuda":
            as_on_cuda(optimizer)
        tracker = Tracker(subject.model, device)
        how = Precision(precision, place.type)
        own = subject.loss if isinstance(subject.loss, nn.Module) else None
        state = TrainState(subject.model, optimizer, scaler=how.scaler(place), loss=own)
        batch = _batch(subject.micro, accumulation)
        advance = _advance(subject, tracker, how, clip)
        with tracker, ExitStack() as hooks:
            hooks.callback(tracker.paths.close)
            hooks.callback(forget_casts)
            _hold(tracker, state, batch)
            _watch_gradients(hooks, tracker, subject.model)
            tracker.record()
            with _failures_in_words():
                advance(state, batch)
            tracker.end()
            tracker.as_if_before("optimizer", _state_tensors(optimizer))
    held = moments(tracker.before, tracker.events)
    unseen = [*tracker.unseen.values(), *always(device)]
    if device == "cuda":
        gaps = reserved(tracker.before, tracker.events) - max(moment.total for moment in held)
        unseen.append(Unseen("reserved", "", WHY_RESERVED, gaps))
    return Trace(device, held, kept(tracker.events), tracker.work.rows(), tuple(unseen))


@contextmanager
def _failures_in_words() -> Iterator[None]:
    """torch's own error is kept as the cause: the real step may fail like this, too, or only the simulated one."""
    try:
        yield
    except RuntimeError as error:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "try one real step: if it works, this model can only be measured on the device, not simulated"
        raise UsageError(f"the step cannot be simulated: {what}{_theirs(error)}", remedy=remedy) from error


def _theirs(error: Exception) -> str:
    """` at FILE:LINE` of the user's code that the error came through last; "" where there is none."""
    ours, installed = Path(__file__).parent.parent, Path(torch.__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    theirs = [f for f in frames if not {ours, installed} & set(Path(f.filename).parents)]
    return f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Also: the backward pass stays on this thread, where the tracker is; torch does not log what fails."""
    dtype = torch.get_default_dtype()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True
    with preserved_rng(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            log.disabled = silent


def _batch(data: Any, accumulation: int) -> StepBatch:
    """The same micro-batch many times, each with memory of its own."""
    first = next((leaf for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)), None)
    size = first.shape[0] if first is not None and first.dim() else 1
    copies = [data] + [tree_map_only(Tensor, torch.clone, data) for _ in range(accumulation - 1)]
    return StepBatch(tuple(MicroBatch(copy, np.arange(size)) for copy in copies))


def _advance(subject: TracedObjects, tracker: Tracker, precision: Precision, clip: bool) -> StepFn:
    """The engine's step, which tells the tracker where it is."""
    inner = as_loss_fn(subject.loss)

    def loss(model: nn.Module, batch: Any) -> Loss | Tensor:
        tracker.forward()
        return inner(model, batch)

    def update_begins(state: TrainState) -> dict[str, Tensor]:
        if subject.optimizer is None:
            tracker.end()
        tracker.update()
        return {}

    return make_step(loss, precision=precision, clip=make_clip("norm" if clip else "none"), probes=[update_begins])


def _hold(tracker: Tracker, state: TrainState, batch: StepBatch) -> None:
    """Says what everything is for that lives between two steps."""
    tracker.hold("weights", state.model.parameters())
    tracker.hold("buffers", state.model.buffers())
    if state.loss is not None:
        tracker.hold("weights", state.loss.parameters())
        tracker.hold("buffers", state.loss.buffers())
    tracker.hold("inputs", (leaf for micro in batch.micro for leaf in tree_flatten(micro.data)[0]))
    tracker.hold("optimizer", _state_tensors(state.optimizer))


def _state_tensors(optimizer: Optimizer) -> list[Any]:
    return tree_flatten([dict(each) for each in optimizer.state.values()])[0]


def _watch_gradients(hooks: ExitStack, tracker: Tracker, model: nn.Module) -> None:
    def noted(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.hold("gradients", (parameter.grad,))

    for parameter in model.parameters():
        if parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(noted)  # type: ignore[no-untyped-call]
            hooks.callback(handle.remove)


class _NoUpdate(Optimizer):
    """Changes nothing: for a step that ends with the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": 0.0})

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]
