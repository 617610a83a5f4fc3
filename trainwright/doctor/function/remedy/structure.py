"""Trials of remedies for faults of the model and its initialisation: the batch is trained on with one change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor

from trainwright.doctor.function.measure.chains import MOST, STEPS, activated, on_one_batch
from trainwright.doctor.function.measure.layers import smaller
from trainwright.doctor.function.measure.structure import (
    copied_from_next,
    unregistered_parameters,
)
from trainwright.doctor.gradient.measure.custom_functions import custom_functions, has_context, replaced
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course, trial


def compared(session: ReplaySession, intervention: Intervention, most: int = STEPS) -> str:
    """The loss over updates on this batch alone, changed and as it was, in words."""
    try:
        was, now = on_one_batch(session, intervention, most)
    except NotReplayable as refused:
        raise NotTried(str(refused)) from None
    better = "" if now[-1] < was[-1] - 1e-4 * abs(was[-1]) else "no better: "
    return f"{better}loss {course(now)} in {len(was)} updates on this batch; as it was: {course(was)}"


def once(change: Callable[[], None]) -> Callable[[], AbstractContextManager[None]]:
    """For ``Intervention.model``: changes the weights before the first of several updates."""
    done: list[bool] = []

    @contextmanager
    def around() -> Iterator[None]:
        if not done:
            done.append(True)
            with torch.no_grad():
                change()
        yield

    return around


@trial("activation_between", steps=260.0)
def activation_between(session: ReplaySession, *, weights: Sequence[str]) -> str:
    """A ReLU after each of these linear layers."""
    return compared(session, activated(session, weights), MOST)


def _trained_too(session: ReplaySession, extra: list[Tensor]) -> str:
    """Trains these tensors too, with an optimizer of the class of the first one."""
    was = session.train(STEPS, repeat=True)
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
            handles = [m.register_forward_pre_hook(unfreeze) for m in session.modules.values()]  # and freezes them
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

        now = session.train(STEPS, Intervention(model=around), repeat=True)
    finally:
        for p, data, grad, requires_grad in before:
            p.grad = None
            p.data = data
            p.requires_grad_(requires_grad)
            p.grad = grad
    better = "" if now[-1] < was[-1] else "no better: "
    return f"{better}loss {course(now)} with them trained; as it was: {course(was)}"


def _take(grads: dict[Tensor, Tensor], parameter: Tensor) -> None:
    assert parameter.grad is not None
    grads[parameter] = parameter.grad.clone()


@trial("register")
def register(session: ReplaySession) -> str:
    """Trains tensors that are not registered as parameters."""
    tensors = list(unregistered_parameters(session).values())
    if not tensors:
        raise NotTried("the layers cannot be found")
    return _trained_too(session, tensors)


@trial("unfreeze")
def unfreeze(session: ReplaySession) -> str:
    """Trains all frozen parameters."""
    return _trained_too(session, [p for p in session.replayer.subject.parameters if not p.requires_grad])


@trial("keep_graph")
def keep_graph(session: ReplaySession, *, behind: Sequence[str]) -> str:
    """Detaches no tensor of the forward pass."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        inputs = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
        with torch.enable_grad():
            output = function(*args, **kwargs)
            if not isinstance(output, Tensor) or not inputs or not output.is_floating_point() or output.requires_grad:
                return output
            return inputs[0] if output.shape == inputs[0].shape else output

    return compared(session, Intervention(ops=change))


@trial("transpose_for_view")
def transpose_for_view(session: ReplaySession) -> str:
    """A permute, of as few dimensions as possible, in place of every view with the same sizes in another order."""

    def permuted(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        output = function(*args, **kwargs)
        if function_name(function) not in ("view", "reshape"):
            return output
        old, new = list(args[0].shape), list(output.shape)
        if old == new or sorted(old) != sorted(new):
            return output
        orders = [order for order in permutations(range(len(old))) if [old[n] for n in order] == new]
        return args[0].permute(min(orders, key=lambda order: sum(i != n for i, n in enumerate(order))))

    intervention = Intervention(ops=permuted)
    was, now = _leak(session, Intervention()), _leak(session, intervention)
    if now >= was:
        raise NotTried("samples are still mixed")
    outcome = compared(session, intervention)
    return f"others' outputs change by {now:.2g}, as it was by {was:.2g} standard deviations; {outcome}"


def _leak(session: ReplaySession, intervention: Intervention) -> float:
    """How far the outputs of the other samples move when the first sample becomes a copy of the second."""
    one, other = (
        session.run(Intervention(ops=intervention.ops, mode="eval", inputs=inputs), upto="forward")
        for inputs in (None, copied_from_next(session.size or 1, 0))
    )
    return _largest_move(tensors_of(one.outputs)[0].double(), tensors_of(other.outputs)[0].double())


def _largest_move(one: Tensor, other: Tensor) -> float:
    return float((one - other)[1:].abs().max() / (one.std() + 1e-12))


@trial("keep_saved")
def keep_saved(session: ReplaySession) -> str:
    """Tensors that the graph saves are copied, so that in-place writes do not change them."""
    intervention = Intervention(
        model=lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    )
    return f"{_gradient_error(session, intervention)}; {compared(session, intervention)}"


def _gradient_error(session: ReplaySession, intervention: Intervention) -> str:
    """The error of the gradient as it was, relative to that with the intervention, in words."""
    was, now = session.run(), session.run(intervention)
    pairs = [(a.double(), b) for name, a in was.grads.items() if a is not None and (b := now.grads[name]) is not None]
    error = sum(float((a - b.double()).pow(2).sum()) for a, b in pairs) ** 0.5
    norm = sum(float(b.double().pow(2).sum()) for _, b in pairs) ** 0.5
    return f"the gradient was off by {error / max(norm, 1e-300):.0%}"


@trial("preserve_rng")
def preserve_rng(session: ReplaySession) -> str:
    """Every activation checkpoint restores the random state in the backward pass."""
    name = "_checkpoint_without_reentrant_generator"
    original = getattr(checkpointing, name, None)
    if original is None:
        raise NotTried("this torch has no such checkpoint")

    def preserving(
        function: Callable[..., object], preserve_rng_state: bool = True, *args: object, **kwargs: object
    ) -> object:
        return original(function, True, *args, **kwargs)

    @contextmanager
    def around() -> Iterator[None]:
        setattr(checkpointing, name, preserving)
        try:
            yield
        finally:
            setattr(checkpointing, name, original)

    intervention = Intervention(model=around)
    return f"{_gradient_error(session, intervention)}; {compared(session, intervention)}"


@trial("derived_backward")
def derived_backward(session: ReplaySession, *, function: str) -> str:
    """Autograd differentiates the forward pass of a custom Function, in place of the Function's own backward pass."""
    with session.live():
        found = [each for each in custom_functions(session) if each.__name__ == function]
    if not found:
        raise NotTried("the Function cannot be found")
    older = has_context(found[0])
    entry = "forward" if older else "setup_context"
    original = inspect.getattr_static(found[0], "forward").__func__
    entered = inspect.getattr_static(found[0], entry).__func__

    def enter(ctx: Any, *args: Any) -> object:
        ctx.forward_args = args if older else args[0]
        return entered(ctx, *args)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        args = [
            a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in ctx.forward_args
        ]
        with torch.enable_grad():
            outputs = tensors_of(original(*((_NullContext(), *args) if older else args)))
        inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        derived = iter(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))
        return tuple(next(derived) if isinstance(a, Tensor) and a.requires_grad else None for a in args)

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as undo:
            undo.enter_context(replaced(found[0], entry, enter))
            undo.enter_context(replaced(found[0], "backward", backward))
            yield

    intervention = Intervention(model=around)
    return f"{_gradient_error(session, intervention)}; {compared(session, intervention)}"


class _NullContext:
    """A context of a Function that saves nothing."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *args: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


@trial("random_weights")
def random_weights(session: ReplaySession, *, weights: Sequence[str]) -> str:
    """Kaiming initialisation for these weights."""
    parameters = session.parameters

    def draw() -> None:
        for name in weights:
            kaiming_(parameters[name])

    return compared(session, Intervention(model=once(draw)))


def kaiming_(weight: Tensor) -> None:
    """Kaiming normal initialisation for ReLU, the same numbers each time."""
    fan_in = weight[0].numel()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(weight.shape, generator=generator, device="cpu") * (2 / fan_in) ** 0.5
    weight.data.copy_(drawn)


@trial("smaller_weights")
def smaller_weights(session: ReplaySession, *, gains: dict[str, float]) -> str:
    """Weights divided by the factors by which they are too large."""

    def change() -> None:
        with smaller(session, gains):
            pass

    return compared(session, Intervention(model=once(change)))
