"""Hooks on modules and optimizers, and patches of torch, that report the calls of a training loop to listeners."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from trainwright.checkpoint.transforms import innermost_transform
from trainwright.recorder.calls import CallBegins, CallEnds, HookPair, call_hooks, leave_out_of_pickles
from trainwright.recorder.function_hooks import listen_to_functions
from trainwright.recorder.listener import Listener as Listener
from trainwright.recorder.listener import (
    call_each,
    changing_listeners,
    has_listeners,
    inside,
    is_muted,
    listeners,
    methods_of,
    sort_listeners,
    tell,
)
from trainwright.recorder.listener import muted as muted
from trainwright.recorder.object_hooks import OBJECT_WRAPPERS
from trainwright.recorder.optimizers import Updates, same_optimizer
from trainwright.recorder.ranks import local_part
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.recorder.user_warnings import at_the_caller


class CallHooks:
    """Hooks on the forward calls of some modules, which can be removed and added again."""

    def __init__(self, modules: Sequence[nn.Module], before: CallBegins, after: CallEnds) -> None:
        self._modules, self._before, self._after = modules, before, after
        self._hooks = ExitStack()
        self._pairs: list[HookPair] = []

    def put_on(self) -> None:
        found = [self._hooks.enter_context(call_hooks(each, self._before, self._after)) for each in self._modules]
        self._pairs = [each for each in found if each is not None]

    def take_off(self) -> None:
        self._pairs = []
        self._hooks.close()

    def pause(self) -> None:
        """Removes the hooks until ``resume``. A call of a module without hooks is 10 us faster."""
        for each in self._pairs:
            each.pause()

    def resume(self) -> None:
        for each in self._pairs:
            each.resume()


@contextmanager
def listening(group: Sequence[Listener], roots: Sequence[nn.Module]) -> Iterator[CallHooks]:
    """Registers listeners for every forward call of ``roots``, and every backward, step, ... of this thread.

    Torch's classes are patched while any listener is registered. A forked process has no listeners. Yields the hooks
    of the forward calls.
    """
    _forget_in_forks()
    mine = [(listener, threading.get_ident()) for listener in group]
    with listening_to_calls(group, roots) as hooks:
        with changing_listeners():
            if not listeners:
                _patches.enter()
            listeners.extend(mine)
        try:
            yield hooks
        finally:
            with changing_listeners():
                listeners[:] = [each for each in listeners if each not in mine]
                if not listeners:
                    _patches.exit()


@contextmanager
def listening_to_calls(group: Sequence[Listener], modules: Sequence[nn.Module]) -> Iterator[CallHooks]:
    """Registers listeners for every forward call of ``modules`` in this thread.

    Nested calls are left out, because the loop does not make them. Calls inside backward, which activation
    checkpointing makes, and under torch.func (vmap, grad), whose tensors have no memory, are left out, too.
    """
    thread, first = threading.get_ident(), group[0]
    begins, ends = methods_of(group, "on_forward"), methods_of(group, "on_output")
    begins_without_grad = methods_of(group, "on_forward_without_grad")

    def is_of_the_loop() -> bool:
        is_here = has_listeners() and thread == threading.get_ident() and (inside.only is None or inside.only is first)
        return is_here and not inside.backward and not innermost_transform()

    def before(root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not is_of_the_loop():
            return
        first.depth += 1
        if first.depth > 1:
            return
        if not torch.is_grad_enabled():
            call_each(begins_without_grad, root, args, kwargs)
        call_each(begins, root, args, kwargs)

    def after(root: nn.Module, args: Args, output: object) -> None:
        if not is_of_the_loop():
            return
        first.depth = max(0, first.depth - 1)
        if not first.depth:
            call_each(ends, root, output)

    hooks = CallHooks(modules, before, after)
    hooks.put_on()
    try:
        yield hooks
    finally:
        hooks.take_off()


class _LoaderIterator(Protocol):
    """An iterator of a DataLoader, with the attribute that the recorder adds."""

    _trainwright_ids: list[object]


class _Patches:
    """Replaces functions and methods of torch, and restores them unless other code has replaced them since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._left: dict[tuple[int, str], object] = {}  # patches that stay, because other code wrapped them

    def enter(self) -> None:
        for owner, name, wrap in _WRAPPERS:
            original = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name, None)
            if original is not None and not is_within(self._left.get((id(owner), name)), original):
                self._replace(owner, name, original, functools.wraps(original)(wrap(original)))
        for register, hook in (
            (register_optimizer_step_pre_hook, _on_step),
            (register_optimizer_step_post_hook, _on_stepped),
        ):
            self._undo.append(register(_not_compiled(hook)).remove)
        self._undo += [listen_to_functions(), leave_out_of_pickles(), _deepen()]

    def _replace(self, owner: Any, name: str, original: object, ours: object) -> None:
        def undo() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
            else:
                self._left[id(owner), name] = ours

        setattr(owner, name, ours)
        self._undo.append(undo)

    def exit(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def is_within(inner: object, outer: object, depth: int = 4) -> bool:
    """Returns True if ``outer`` is ``inner``, or wraps it: in a closure, a bound method or ``__wrapped__``."""
    if inner is None or depth == 0:
        return False
    cells = [cell.cell_contents for cell in getattr(outer, "__closure__", None) or () if _is_filled(cell)]
    around = [*cells, getattr(outer, "__wrapped__", None), getattr(outer, "__func__", None)]
    return inner is outer or any(is_within(inner, each, depth - 1) for each in around if callable(each))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _deepen() -> Callable[[], None]:
    """Raises the recursion limit, because hooks add a frame to each call of a recursive module."""
    before = sys.getrecursionlimit()
    ours = before + before // 2 + 200
    sys.setrecursionlimit(ours)

    def undo() -> None:
        if sys.getrecursionlimit() == ours:
            sys.setrecursionlimit(before)

    return undo


_patches = _Patches()


def stop_all() -> None:
    """Removes all listeners, as in a forked process, and restores torch's classes."""
    for listener, _ in listeners:
        listener.on_forked()
    listeners.clear()
    sort_listeners()
    _patches.exit()


@functools.cache
def _forget_in_forks() -> None:
    if hasattr(os, "register_at_fork"):  # other systems do not fork
        os.register_at_fork(after_in_child=stop_all)


_updates = Updates()


def _on_step(stepping: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Reports an update. A closure computes the gradients, so the report then follows its first call."""
    if not has_listeners():
        return None
    optimizer = same_optimizer(stepping)
    if not _updates.begins(optimizer, stepping):
        return None
    if len(args) == 1 and not kwargs:  # the usual case, checked in every step
        tell("on_step", optimizer, ())
        return None
    values = (*args[1:], *kwargs.values())
    closure = next(filter(callable, values), None)
    if closure is None:
        tell("on_step", optimizer, values)
        return None
    calls = 0

    @functools.wraps(closure)
    def counted() -> object:
        nonlocal calls
        result = closure()
        calls += 1
        if calls == 1:
            tell("on_step", optimizer, values)
        else:
            tell("on_closure_again", optimizer)
        return result

    return tuple(counted if a is closure else a for a in args), {
        k: counted if v is closure else v for k, v in kwargs.items()
    }


def _on_stepped(stepping: Optimizer, args: Args, kwargs: Kwargs) -> None:
    optimizer = same_optimizer(stepping)
    if _updates.ends(optimizer, stepping):
        tell("on_stepped", optimizer)


def _not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a hook so that torch.compile of an optimizer's step does not compile the recorder."""
    compiled_apart: list[Callable[..., Any]] = []

    def call(*args: object) -> object:
        if is_muted():  # the usual case of a run of the engine
            return None
        if get_eval_frame_callback() is None:  # no compiled code runs, and importing torch._dynamo takes a second
            return hook(*args)
        if not compiled_apart:
            compiled_apart.append(torch._dynamo.disable(hook))  # type: ignore[no-untyped-call]
        return compiled_apart[0](*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


_OF_GRAD = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
_OF_BACKWARD = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")


def _without_iterators(args: tuple[object, ...], kwargs: Kwargs) -> tuple[tuple[object, ...], Kwargs]:
    """Returns the arguments with generators read into tuples, because a listener and torch both read them."""
    read = [tuple(each) if isinstance(each, Iterator) else each for each in (*args, *kwargs.values())]
    return tuple(read[: len(args)]), dict(zip(kwargs, read[len(args) :]))


def _wrap_backward(original: TorchFunction) -> TorchFunction:
    def backward(tensors: Tensor | Iterable[Tensor], *args: object, **kwargs: object) -> object:
        if inside.backward or not has_listeners():
            return original(tensors, *args, **kwargs)
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        tensors = tensors if isinstance(tensors, Tensor) else losses
        args, kwargs = _without_iterators(args, kwargs)
        options = dict(zip(_OF_BACKWARD, args)) | kwargs if args else kwargs
        tell("on_backward", losses, options)
        inside.enter("backward")
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            inside.leave("backward")
        tell("on_gradients")
        return result

    return backward


def _wrap_tensor_backward(original: TorchFunction) -> TorchFunction:
    """Wraps Tensor.backward, so that listeners can stop the tape, which would record it as a torch function."""

    def backward(self: Tensor, *args: object, **kwargs: object) -> object:
        tell("on_backward_called")
        return original(self, *args, **kwargs)

    return backward


def _wrap_grad(original: TorchFunction) -> TorchFunction:
    """Wraps torch.autograd.grad. Under a TorchFunctionMode, grad calls itself; the inner call is not reported."""

    def grad(*args: object, **kwargs: object) -> object:
        if not has_listeners():
            return original(*args, **kwargs)
        args, kwargs = _without_iterators(args, kwargs)
        if not inside.grad and not inside.backward:
            named = dict(zip(_OF_GRAD, args)) | kwargs
            tell("on_autograd_grad", named.pop("outputs", ()), named.pop("inputs", ()), named)
        inside.enter("grad")
        try:
            return original(*args, **kwargs)
        finally:
            inside.leave("grad")

    return grad


def _wrap_zero_grad(original: TorchFunction) -> TorchFunction:
    def zero_grad(self: object, *args: object, **kwargs: object) -> object:
        tell("on_zero_grad", same_optimizer(self))
        return original(self, *args, **kwargs)

    return zero_grad


def _wrap_scale(original: TorchFunction) -> TorchFunction:
    def scale(self: object, outputs: object) -> object:
        scaled = original(self, outputs)
        tell("on_scaled", self, outputs, scaled)
        return scaled

    return scale


def _wrap_unscale(original: TorchFunction) -> TorchFunction:
    def unscale_(self: GradScaler, optimizer: Optimizer) -> object:
        tell("on_unscale", self, same_optimizer(optimizer))
        result = original(self, optimizer)
        tell("on_gradients_changed")
        return result

    return unscale_


def _wrap_scaler_step(original: TorchFunction) -> TorchFunction:
    def step(self: GradScaler, optimizer: Optimizer, *args: object, **kwargs: object) -> object:
        if not has_listeners():
            return original(self, optimizer, *args, **kwargs)
        seen: list[Optimizer] = []  # stays empty if the scaler skips the update
        handle = optimizer.register_step_post_hook(lambda optimizer, *rest: seen.append(optimizer))
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        tell("on_scaler_step", self, same_optimizer(optimizer), bool(seen))
        return result

    return step


def _wrap_update(original: TorchFunction) -> TorchFunction:
    def update(self: GradScaler, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        tell("on_scaler_update", self)
        return result

    return update


def _wrap_clip(by: str, limit: str) -> Callable[[TorchFunction], TorchFunction]:
    """Makes a wrapper of a function that clips gradients. ``limit`` is the name of its second argument."""

    def wrap(original: TorchFunction) -> TorchFunction:
        def clip(parameters: Tensor | Iterable[Tensor], *args: object, **kwargs: object) -> object:
            if not has_listeners():
                return original(parameters, *args, **kwargs)
            clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            named: dict[str, Any] = dict(zip((limit, "total_norm"), args)) | kwargs
            norm = local_part(named["total_norm"]) if by == "norm" else None
            tell("on_clip", by, float(named[limit]), clipped, norm)
            result = original(clipped, *args, **kwargs)
            tell("on_gradients_changed")
            return result

        return clip

    return wrap


def _wrap_schedule(original: TorchFunction) -> TorchFunction:
    def step(self: object, *args: object, **kwargs: object) -> object:
        inside.enter("schedule")  # SequentialLR.step calls step of other schedulers
        try:
            result = original(self, *args, **kwargs)
        finally:
            inside.leave("schedule")
        if not inside.schedule:
            if args or kwargs:
                tell("on_metric", self, (*args, *kwargs.values())[0])
            tell("on_schedule", self)
        return result

    return step


def _wrap_iter_init(original: TorchFunction) -> TorchFunction:
    def init(self: _LoaderIterator, loader: object, *args: object, **kwargs: object) -> None:
        self._trainwright_ids = []  # what the sampler returned for batches that the loop has not received yet
        original(self, loader, *args, **kwargs)
        tell("on_epoch", loader, self)

    return init


def _wrap_reset(original: TorchFunction) -> TorchFunction:
    """Wraps ``_reset`` of a DataLoader iterator.

    A new iterator calls it once (``first_iter``). With persistent workers, each later epoch resets the same iterator.
    """

    def reset(self: _LoaderIterator, loader: object, first_iter: bool = False) -> None:
        self._trainwright_ids = []
        original(self, loader, first_iter)
        if not first_iter:
            tell("on_epoch", loader, self)

    return reset


def _wrap_next_index(original: TorchFunction) -> TorchFunction:
    def next_index(self: object) -> object:
        ids = original(self)
        if hasattr(self, "_trainwright_ids"):
            self._trainwright_ids.append(ids)
        return ids

    return next_index


def _wrap_next(original: TorchFunction) -> TorchFunction:
    def next_batch(self: object) -> object:
        begin_s = time.perf_counter()
        batch = original(self)
        waiting = getattr(self, "_trainwright_ids", None)
        ids = waiting.pop(0) if waiting else None
        tell("on_batch", self, ids, batch, time.perf_counter() - begin_s)
        return batch

    return next_batch


def _wrap_wrapped_call(original: TorchFunction) -> TorchFunction:
    def forward(self: DistributedDataParallel, *args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling():
            tell("on_wrapped_call", self, self.require_backward_grad_sync)
        return original(self, *args, **kwargs)

    return forward


def _wrap_pre_forward(original: TorchFunction) -> TorchFunction:
    """Wraps the synchronization of buffers by DistributedDataParallel before a forward pass."""

    def pre_forward(self: object, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not has_listeners():
            return original(self, *args, **kwargs)
        begin_s = time.perf_counter()
        result = original(self, *args, **kwargs)
        tell("on_waited", time.perf_counter() - begin_s)
        return result

    return pre_forward


def _wrap_all_reduce(original: TorchFunction) -> TorchFunction:
    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not has_listeners():
            return original(tensor, *args, **kwargs)
        tell("on_reduce", tensor, args[0] if args else kwargs.get("op", distributed.ReduceOp.SUM))
        begin_s = time.perf_counter()
        result = original(tensor, *args, **kwargs)
        tell("on_reduced", tensor, time.perf_counter() - begin_s)
        return result

    return all_reduce


_Iter: type = dataloader._BaseDataLoaderIter
_MultiIter: type = dataloader._MultiProcessingDataLoaderIter
_WRAPPERS: tuple[tuple[object, str, Callable[[TorchFunction], TorchFunction]], ...] = (
    (torch.autograd, "backward", _wrap_backward),
    (torch.autograd, "grad", _wrap_grad),
    (Tensor, "backward", _wrap_tensor_backward),
    (Optimizer, "zero_grad", _wrap_zero_grad),
    (nn.Module, "zero_grad", _wrap_zero_grad),
    (GradScaler, "scale", _wrap_scale),
    (GradScaler, "unscale_", _wrap_unscale),
    (GradScaler, "step", _wrap_scaler_step),
    (GradScaler, "update", _wrap_update),
    # clip_grad_norm_ calls it, however it was imported
    (clip_grad, "_clip_grads_with_norm_", _wrap_clip("norm", "max_norm")),
    (nn.utils, "clip_grads_with_norm_", _wrap_clip("norm", "max_norm")),
    (nn.utils, "clip_grad_value_", _wrap_clip("value", "clip_value")),
    (lr_scheduler.LRScheduler, "step", _wrap_schedule),
    (lr_scheduler.ReduceLROnPlateau, "step", _wrap_schedule),
    (lr_scheduler.CosineAnnealingWarmRestarts, "step", _wrap_schedule),
    (lr_scheduler.SequentialLR, "step", _wrap_schedule),
    (lr_scheduler.ChainedScheduler, "step", _wrap_schedule),
    (_Iter, "__init__", _wrap_iter_init),
    (_Iter, "_next_index", _wrap_next_index),
    (_Iter, "__next__", _wrap_next),
    (_MultiIter, "_reset", _wrap_reset),
    (DistributedDataParallel, "forward", _wrap_wrapped_call),
    (DistributedDataParallel, "_pre_forward", _wrap_pre_forward),
    (distributed, "all_reduce", _wrap_all_reduce),
    (warnings, "showwarning", at_the_caller),
    *OBJECT_WRAPPERS,
)
