"""Trials of remedies for faults of the model and its initialisation: the batch is trained on with one change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import permutations

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.doctor.measure.first_step import smaller
from trainwright.doctor.measure.layers import DROPOUTS
from trainwright.doctor.measure.samples import other_in_place
from trainwright.doctor.measure.wiring import MOST, STEPS, activated, on_one_batch, unregistered_parameters
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import argument, function_name
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course


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


def register(session: ReplaySession) -> str:
    """Trains tensors that are not registered as parameters."""
    tensors = list(unregistered_parameters(session).values())
    if not tensors:
        raise NotTried("the layers cannot be found")
    return _trained_too(session, tensors)


def unfreeze(session: ReplaySession) -> str:
    """Trains all frozen parameters."""
    return _trained_too(session, [p for p in session.replayer.subject.parameters if not p.requires_grad])


def keep_graph(session: ReplaySession) -> str:
    """Detaches no tensor of the forward pass."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        inputs = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
        with torch.enable_grad():
            output = function(*args, **kwargs)
            if not isinstance(output, Tensor) or not inputs or not output.is_floating_point() or output.requires_grad:
                return output
            return inputs[0] if output.shape == inputs[0].shape else output

    return compared(session, Intervention(ops=change))


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
        for inputs in (None, other_in_place(session.size or 1, 0))
    )
    return _largest_move(tensors_of(one.outputs)[0].double(), tensors_of(other.outputs)[0].double())


def _largest_move(one: Tensor, other: Tensor) -> float:
    return float((one - other)[1:].abs().max() / (one.std() + 1e-12))


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


def smaller_weights(session: ReplaySession, *, gains: Mapping[str, float]) -> str:
    """Weights divided by the factors by which they are too large."""

    def change() -> None:
        with smaller(session, gains):
            pass

    return compared(session, Intervention(model=once(change)))


def revived(session: ReplaySession) -> str:
    """Biases of 0 where they are far below what the weights contribute; if there are none, LeakyReLU for ReLU."""
    maps = [m for m in session.modules.values() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    layers = [(m.weight, m.bias) for m in maps if m.bias is not None]

    def is_outweighed(weight: Tensor, bias: Tensor) -> Tensor:
        norms: Tensor = weight.detach().flatten(1).norm(dim=1)
        return bias.detach() < -4 * norms

    def change() -> None:
        for weight, bias in layers:
            bias.data[is_outweighed(weight, bias)] = 0.0

    if any(bool(is_outweighed(weight, bias).any()) for weight, bias in layers):
        return "bias 0: " + compared(session, Intervention(model=once(change)))

    def leaky(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        is_relu = function_name(function) in ("relu", "relu_")
        return F.leaky_relu(args[0], 0.01) if is_relu else function(*args, **kwargs)

    return "LeakyReLU: " + compared(session, Intervention(ops=leaky))


def relu_for_sigmoid(session: ReplaySession) -> str:
    """ReLU for every sigmoid and tanh, with weights initialised for ReLU."""
    matrices = [m.weight for m in session.modules.values() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]

    def ops(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) in ("sigmoid", "tanh", "hardsigmoid", "softsign"):
            return args[0].relu()
        return function(*args, **kwargs)

    def draw() -> None:
        for weight in matrices:
            kaiming_(weight)
        matrices[-1].data.mul_(0.1)

    was = _first_gradient(session, Intervention(), matrices)
    now = _first_gradient(session, Intervention(ops=ops, model=once(draw)), matrices)
    better = "" if now > 100 * was else "no better: "
    outcome = compared(session, Intervention(ops=ops, model=once(draw)))
    return f"{better}the first layer's gradient is {now:.1e} of the largest, as it was {was:.1e}; {outcome}"


def _first_gradient(session: ReplaySession, intervention: Intervention, matrices: Sequence[Tensor]) -> float:
    """The gradient norm of the first of ``matrices``, as a share of the largest."""
    names = {id(p): name for name, p in session.parameters.items()}
    grads = session.run(intervention).grads
    sizes = [float(g.norm()) for w in matrices if (g := grads.get(names.get(id(w), ""))) is not None]
    return sizes[0] / max(*sizes, 1e-300) if sizes else 0.0


def group_norm(session: ReplaySession) -> str:
    """GroupNorm in place of BatchNorm."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) != "batch_norm":
            return function(*args, **kwargs)
        channels = args[0].shape[1]
        groups = max(n for n in (1, 2, 4) if channels % n == 0)
        arguments = inspect.signature(F.batch_norm).bind(*args, **kwargs).arguments
        return F.group_norm(args[0], groups, arguments.get("weight"), arguments.get("bias"))

    return compared(session, Intervention(ops=change))


def less_dropout(session: ReplaySession) -> str:
    """Dropout of 0.2 in place of every dropout above 0.5. Every update draws new masks."""

    def ops(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        p = argument(args, kwargs, 1, "p", 0.5)
        if function_name(function) not in DROPOUTS or not isinstance(p, float) or p <= 0.5:
            return function(*args, **kwargs)
        return function(args[0], 0.2, *args[2:], **{k: v for k, v in kwargs.items() if k != "p"})

    was, now = (session.train(16, Intervention(ops=each, fresh_rng=True), repeat=True) for each in (None, ops))
    ends = [sum(losses[-4:]) / 4 for losses in (was, now)]
    better = "" if ends[1] < ends[0] else "no better: "
    courses = [f"{losses[0]:.4g} -> {end:.4g}" for losses, end in zip((was, now), ends)]
    return f"{better}loss {courses[1]} in 16 updates on this batch; as it was: {courses[0]}"


def scaled_scores(session: ReplaySession) -> str:
    """Attention scores soft-capped at 30 by a tanh."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) != "softmax" or args[0].dim() < 3:
            return function(*args, **kwargs)
        scores = args[0]
        capped = torch.where(scores > -1e4, 30 * torch.tanh(scores / 30), scores)
        return function(capped, *args[1:], **kwargs)

    return compared(session, Intervention(ops=change))


def balanced_router(session: ReplaySession, *, experts: int) -> str:
    """The mean over all samples is subtracted from the router's scores, so that no expert is preferred by all."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) != "softmax" or args[0].shape[-1] != experts:
            return function(*args, **kwargs)
        scores = args[0]
        return function(scores - scores.flatten(0, -2).mean(0), *args[1:], **kwargs)

    return compared(session, Intervention(ops=change))
