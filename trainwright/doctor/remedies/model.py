"""Trials of remedies for faults of the model: training on the batch with one change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from trainwright.doctor.measure.first_step import smaller
from trainwright.doctor.measure.layers import DROPOUTS
from trainwright.doctor.measure.wiring import MAX_UPDATES, MIN_UPDATES, activated, on_one_batch, unregistered_parameters
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import argument, function_name
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course


def compare_losses(session: ReplaySession, intervention: Intervention, most: int = MIN_UPDATES) -> str:
    """Returns text on the loss over updates on this batch, unchanged and changed."""
    try:
        was, now = on_one_batch(session, intervention, most)
    except NotReplayable as refused:
        raise NotTried(str(refused)) from None
    better = "" if now[-1] < was[-1] - 1e-4 * abs(was[-1]) else "no better: "
    return f"{better}loss {course(now)} in {len(was)} updates on this batch; unchanged: {course(was)}"


def once(change: Callable[[], None]) -> Callable[[], AbstractContextManager[None]]:
    """Makes an ``Intervention.model`` that changes the weights before the first of several updates."""
    done: list[bool] = []

    @contextmanager
    def around() -> Iterator[None]:
        if not done:
            done.append(True)
            with torch.no_grad():
                change()
        yield

    return around


def activation_between(session: ReplaySession, *, weights: Sequence[str]) -> str:
    """Tries a ReLU after each of these linear layers."""
    return compare_losses(session, activated(session, weights), MAX_UPDATES)


def _trained_too(session: ReplaySession, extra: list[Tensor]) -> str:
    """Trains these tensors as well, with an optimizer of the first one's class."""
    was = session.train(MIN_UPDATES, repeat=True)
    optimizer = session.optimizers[0]
    before = [(p, p.data, p.grad, p.requires_grad) for p in extra]

    def unfreeze(*hook_arguments: object) -> None:
        for p in extra:
            p.requires_grad_(True)

    try:
        for p, data, _, _ in before:
            p.grad = None
            p.data = data.clone()
        unfreeze()
        also = type(optimizer)(extra, lr=float(optimizer.param_groups[0]["lr"]))  # type: ignore[call-arg]

        @contextmanager
        def around() -> Iterator[None]:
            grads: dict[Tensor, Tensor] = {}  # a replay drops gradients of tensors that it does not know
            # the replay freezes them
            handles = [m.register_forward_pre_hook(unfreeze) for m in session.modules.values()]
            for p in extra:
                handle = p.register_post_accumulate_grad_hook(partial(_take, grads))  # type: ignore[no-untyped-call]
                handles.append(handle)
            yield
            for handle in handles:
                handle.remove()
            for p in extra:
                p.grad = grads.get(p)
            also.step()
            also.zero_grad()

        now = session.train(MIN_UPDATES, Intervention(model=around), repeat=True)
    finally:
        for p, data, grad, requires_grad in before:
            p.grad = None
            p.data = data
            p.requires_grad_(requires_grad)
            p.grad = grad
    better = "" if now[-1] < was[-1] else "no better: "
    return f"{better}loss {course(now)} with them trained; unchanged: {course(was)}"


def _take(grads: dict[Tensor, Tensor], parameter: Tensor) -> None:
    assert parameter.grad is not None
    grads[parameter] = parameter.grad.clone()


def register(session: ReplaySession) -> str:
    """Tries to train tensors that are not registered as parameters."""
    tensors = list(unregistered_parameters(session).values())
    if not tensors:
        raise NotTried("the layers cannot be found")
    return _trained_too(session, tensors)


def unfreeze(session: ReplaySession) -> str:
    """Tries to train all frozen parameters."""
    return _trained_too(session, [p for p in session.replayer.subject.parameters if not p.requires_grad])


def keep_graph(session: ReplaySession) -> str:
    """Tries a forward pass that detaches no tensor."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        inputs = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
        with torch.enable_grad():
            output = function(*args, **kwargs)
            if not isinstance(output, Tensor) or not inputs or not output.is_floating_point() or output.requires_grad:
                return output
            return inputs[0] if output.shape == inputs[0].shape else output

    return compare_losses(session, Intervention(ops=change))


def random_weights(session: ReplaySession, *, weights: Sequence[str]) -> str:
    """Tries Kaiming initialization for these weights."""
    parameters = session.parameters

    def draw() -> None:
        for name in weights:
            kaiming_(parameters[name])

    return compare_losses(session, Intervention(model=once(draw)))


def kaiming_(weight: Tensor) -> None:
    """Applies Kaiming normal initialization for ReLU, with a fixed seed."""
    fan_in = weight[0].numel()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(weight.shape, generator=generator, device="cpu") * (2 / fan_in) ** 0.5
    weight.data.copy_(drawn)


def smaller_weights(session: ReplaySession, *, gains: Mapping[str, float]) -> str:
    """Tries weights divided by the factors by which they are too large."""

    def change() -> None:
        with smaller(session, gains):
            pass

    return compare_losses(session, Intervention(model=once(change)))


def group_norm(session: ReplaySession) -> str:
    """Tries GroupNorm instead of BatchNorm."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) != "batch_norm":
            return function(*args, **kwargs)
        channels = args[0].shape[1]
        groups = max(n for n in (1, 2, 4) if channels % n == 0)
        arguments = inspect.signature(F.batch_norm).bind(*args, **kwargs).arguments
        return F.group_norm(args[0], groups, arguments.get("weight"), arguments.get("bias"))

    return compare_losses(session, Intervention(ops=change))


def less_dropout(session: ReplaySession) -> str:
    """Tries dropout of 0.2 instead of every dropout above 0.5. Every update draws new masks."""

    def ops(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        p = argument(args, kwargs, 1, "p", 0.5)
        if function_name(function) not in DROPOUTS or not isinstance(p, float) or p <= 0.5:
            return function(*args, **kwargs)
        return function(args[0], 0.2, *args[2:], **{k: v for k, v in kwargs.items() if k != "p"})

    was, now = (session.train(16, Intervention(ops=each, fresh_rng=True), repeat=True) for each in (None, ops))
    ends = [sum(losses[-4:]) / 4 for losses in (was, now)]
    better = "" if ends[1] < ends[0] else "no better: "
    courses = [f"{losses[0]:.4g} -> {end:.4g}" for losses, end in zip((was, now), ends)]
    return f"{better}loss {courses[1]} in 16 updates on this batch; unchanged: {courses[0]}"
