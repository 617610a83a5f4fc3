"""Trials of remedies for faults of the model and its initialisation: one thing is changed, the batch is trained on."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor

from trainwright.recorder.program import tensors_of
from trainwright.replay.experiments.derivatives import custom_functions, has_context, replaced
from trainwright.replay.experiments.layers import smaller
from trainwright.replay.experiments.model import FEW_ROWS, aliased, strangers
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial

STEPS = 8
_NARROW = (torch.float16, torch.bfloat16)


def compared(bench: ReplaySession, edit: Intervention, most: int = STEPS) -> str:
    """The loss over some updates on this batch alone, changed and as it was.

    ``most`` updates where they take a second, at least a few.
    """
    begin_s = time.perf_counter()
    bench.run()
    steps = max(STEPS, min(most, int(0.5 / (time.perf_counter() - begin_s))))
    was, now = bench.train(steps, repeat=True), bench.train(steps, edit, repeat=True)
    if len(now) < steps or len(was) < steps:
        raise NotTried("the step could not be run again")
    better = "" if now[-1] < was[-1] - 1e-4 * abs(was[-1]) else "no better: "
    return (
        f"{better}loss {now[0]:.4g} -> {now[-1]:.4g} in {steps} updates on this batch; "
        f"as it was: {was[0]:.4g} -> {was[-1]:.4g}"
    )


def with_ops(bench: ReplaySession, change: Callable[[str, Any, Any, Any], Any], most: int = STEPS) -> str:
    def ops(function: Any, args: Any, kwargs: Any) -> Any:
        return change(getattr(function, "__name__", "?"), function, args, kwargs)

    return compared(bench, Intervention(ops=ops), most)


def once(change: Callable[[], None]) -> Callable[[], Any]:
    """A context for ``Intervention.model`` that changes the weights before the first of several updates."""
    done: list[bool] = []

    @contextmanager
    def around() -> Iterator[None]:
        if not done:
            done.append(True)
            with torch.no_grad():
                change()
        yield

    return around


def named(bench: ReplaySession) -> dict[str, Tensor]:
    return dict(zip(bench.player.names, bench.player.subject.parameters))


@trial("activation_between")
def activation_between(bench: ReplaySession, *, weights: Sequence[str]) -> str:
    """A ReLU after each of these linear layers."""
    wanted = {id(named(bench)[name]) for name in weights}

    def change(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return made.relu() if any(id(x) in wanted for x in tensors_of(args, 2)[1:2]) else made

    return with_ops(bench, change, 128)  # what depth is good for shows late


def _trained_too(bench: ReplaySession, extra: list[Tensor]) -> str:
    """These tensors are trained as well, by an optimizer like the first."""
    was = bench.train(STEPS, repeat=True)
    optimizer = bench.optimizers[0]
    kept = [(p, p.data, p.grad, p.requires_grad) for p in extra]

    def ask(*given: Any) -> None:
        for p in extra:
            p.requires_grad_(True)

    try:
        for p, data, _, _ in kept:
            p.grad = None
            p.data = data.clone()
        ask()
        also = type(optimizer)(extra, lr=float(optimizer.param_groups[0]["lr"]))  # type: ignore[call-arg]

        @contextmanager
        def around() -> Iterator[None]:
            grads: dict[Tensor, Tensor] = {}  # a replay takes the gradients of strangers away
            handles = [m.register_forward_pre_hook(ask) for m in bench.modules.values()]  # and freezes again
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

        now = bench.train(STEPS, Intervention(model=around), repeat=True)
    finally:
        for p, data, grad, asked in kept:
            p.grad = None
            p.data = data
            p.requires_grad_(asked)
            p.grad = grad
    better = "" if now[-1] < was[-1] else "no better: "
    return f"{better}loss {now[0]:.4g} -> {now[-1]:.4g} with them trained; as it was: {was[0]:.4g} -> {was[-1]:.4g}"


def _take(grads: dict[Tensor, Tensor], parameter: Tensor) -> None:
    assert parameter.grad is not None
    grads[parameter] = parameter.grad.clone()


@trial("register")
def register(bench: ReplaySession) -> str:
    """Layers that are in no ``parameters()`` are trained as well."""
    found = list(strangers(bench).values())
    if not found:
        raise NotTried("the layers are not to be found")
    return _trained_too(bench, found)


@trial("unfreeze")
def unfreeze(bench: ReplaySession) -> str:
    """All weights that are frozen are trained."""
    return _trained_too(bench, [p for p in bench.player.subject.parameters if not p.requires_grad])


@trial("keep_graph")
def keep_graph(bench: ReplaySession, *, behind: Sequence[str]) -> str:
    """No tensor of the forward pass is detached."""

    def change(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        given = [t for t in tensors_of([args, kwargs], 3) if t.requires_grad]
        with torch.enable_grad():
            made = function(*args, **kwargs)
            is_cut = isinstance(made, Tensor) and given and made.is_floating_point() and not made.requires_grad
            return given[0] if is_cut and made.shape == given[0].shape else made

    return with_ops(bench, change)


@trial("transpose_for_view")
def transpose_for_view(bench: ReplaySession) -> str:
    """A permute, of as few dimensions as will do, wherever a view gives the same sizes in another order."""

    def change(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if name not in ("view", "reshape"):
            return made
        was, now = list(args[0].shape), list(made.shape)
        if was == now or sorted(was) != sorted(now):
            return made
        orders = [order for order in permutations(range(len(was))) if [was[n] for n in order] == now]
        return args[0].permute(min(orders, key=lambda order: sum(i != n for i, n in enumerate(order))))

    def ops(function: Any, args: Any, kwargs: Any) -> Any:
        return change(getattr(function, "__name__", "?"), function, args, kwargs)

    edit = Intervention(ops=ops)
    was, now = _leak(bench, Intervention()), _leak(bench, edit)
    if now >= was:
        raise NotTried("samples are still mixed")
    return f"others' outputs change by {now:.2g}, as it was by {was:.2g} standard deviations; {compared(bench, edit)}"


def _leak(bench: ReplaySession, edit: Intervention) -> float:
    """How much the other samples' outputs move when the first is replaced by the second."""
    size = bench.size or 1

    def swap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != size:
            return leaf
        return torch.cat([leaf[1:2], leaf[1:]])

    def inputs(number: int, args: Any, kwargs: Any) -> Any:
        return tuple(map(swap, args)), {k: swap(v) for k, v in kwargs.items()}

    one = tensors_of(bench.run(Intervention(ops=edit.ops, mode="eval"), upto="forward").outputs)[0].double()
    other = tensors_of(bench.run(Intervention(ops=edit.ops, mode="eval", inputs=inputs), upto="forward").outputs)[
        0
    ].double()
    return float((one - other)[1:].abs().max() / (one.std() + 1e-12))


@trial("positions_in_fp32")
def positions_in_fp32(bench: ReplaySession) -> str:
    """Whole numbers above 256 are not rounded to 16 bit."""
    num = 0

    def change(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        nonlocal num
        wants = [d for d in [*args, *kwargs.values()] if isinstance(d, torch.dtype)]
        narrow = any(d in _NARROW for d in wants) or name in ("bfloat16", "half")
        if name == "arange" and narrow:
            num += 1
            return function(*args, **{**kwargs, "dtype": torch.float32})
        if narrow and isinstance(args[0], Tensor) and _are_positions(args[0]):
            num += 1
            return args[0].float()
        device = bench.player.subject.parameters[0].device.type
        was_on = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if was_on else nullcontext():
            tables = [t for t in tensors_of(args, 2) if not t.requires_grad and _are_positions(t)]
            if tables and name in ("matmul", "__matmul__", "outer", "einsum", "bmm", "mul"):
                num += was_on
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def ops(function: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "?")
        if name in ("sin", "cos"):
            alike.append(aliased(args[0])[1])
        return change(name, function, args, kwargs)

    alike: list[int] = []
    bench.run(Intervention(ops=ops), upto="forward")
    if num == 0:
        raise NotTried("where they are rounded is not to be seen from outside")
    return f"{num} roundings left out: {max(alike, default=0)} positions have the angles of their neighbour"


def _are_positions(x: Tensor) -> bool:
    if x.requires_grad or x.numel() <= FEW_ROWS or x.is_complex():
        return False
    values = x.detach().double()
    return bool((values == values.round()).all()) and float(values.max()) > FEW_ROWS


@trial("keep_saved")
def keep_saved(bench: ReplaySession) -> str:
    """What the graph saves is copied, so that a later write does not reach it."""
    edit = Intervention(
        model=lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    )
    return f"{_turned(bench, edit)}; {compared(bench, edit)}"


def _turned(bench: ReplaySession, edit: Intervention) -> str:
    """How far the gradient is from what it was."""
    was, now = bench.run(), bench.run(edit)
    pairs = [(a.double(), b) for name, a in was.grads.items() if a is not None and (b := now.grads[name]) is not None]
    off = sum(float((a - b.double()).pow(2).sum()) for a, b in pairs) ** 0.5
    whole = sum(float(b.double().pow(2).sum()) for _, b in pairs) ** 0.5
    return f"the gradient was off by {off / max(whole, 1e-300):.0%}"


@trial("preserve_rng")
def preserve_rng(bench: ReplaySession) -> str:
    """Every checkpoint puts the random generators back before it computes again."""
    name = "_checkpoint_without_reentrant_generator"
    original = getattr(checkpointing, name, None)
    if original is None:
        raise NotTried("this torch has no such checkpoint")

    def kept(function: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Any:
        return original(function, True, *args, **kwargs)

    @contextmanager
    def around() -> Iterator[None]:
        setattr(checkpointing, name, kept)
        try:
            yield
        finally:
            setattr(checkpointing, name, original)

    edit = Intervention(model=around)
    return f"{_turned(bench, edit)}; {compared(bench, edit)}"


@trial("derived_backward")
def derived_backward(bench: ReplaySession, *, function: str) -> str:
    """Autograd differentiates the forward of a custom Function."""
    with bench.live():
        found = [each for each in custom_functions(bench) if each.__name__ == function]
    if not found:
        raise NotTried("the Function is not to be found")
    older = has_context(found[0])
    entry = "forward" if older else "setup_context"
    original = inspect.getattr_static(found[0], "forward").__func__
    entered = inspect.getattr_static(found[0], entry).__func__

    def enter(ctx: Any, *args: Any) -> Any:
        ctx.given = args if older else args[0]
        return entered(ctx, *args)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        args = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in ctx.given]
        with torch.enable_grad():
            made = tensors_of(original(*((_Nothing(), *args) if older else args)))
        asked = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        told = iter(torch.autograd.grad(made, asked, grads, allow_unused=True))
        return tuple(next(told) if isinstance(a, Tensor) and a.requires_grad else None for a in args)

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as undo:
            undo.enter_context(replaced(found[0], entry, enter))
            undo.enter_context(replaced(found[0], "backward", backward))
            yield

    edit = Intervention(model=around)
    return f"{_turned(bench, edit)}; {compared(bench, edit)}"


class _Nothing:
    """A context that keeps nothing."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *args: Any) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


@trial("random_weights")
def random_weights(bench: ReplaySession, *, weights: Sequence[str]) -> str:
    """Kaiming weights for these layers."""
    known = named(bench)

    def draw() -> None:
        for name in weights:
            redrawn(known[name])

    return compared(bench, Intervention(model=once(draw)))


def redrawn(weight: Tensor) -> None:
    fan_in = weight[0].numel()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(weight.shape, generator=generator) * (2 / fan_in) ** 0.5
    weight.data.copy_(drawn)


@trial("smaller_weights")
def smaller_weights(bench: ReplaySession, *, gains: dict[str, float]) -> str:
    """Weights divided by what they are too large by."""

    def change() -> None:
        with smaller(bench, gains):
            pass

    return compared(bench, Intervention(model=once(change)))
