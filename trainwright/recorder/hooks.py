"""Sees what a training loop does, without a change to it: the calls that every loop makes, told to a listener."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from trainwright.recorder.calls import hearing
from trainwright.recorder.listener import Listener as Listener
from trainwright.recorder.listener import careful, inside, is_heard, listeners, listens_to, sort_listeners, tell_of
from trainwright.recorder.listener import muted as muted


@contextmanager
def listening(group: Sequence[Listener], roots: Sequence[nn.Module]) -> Iterator[None]:
    """Tells each of ``group`` of every forward call of ``roots``, and of every backward, step, ... of this thread.

    Torch's classes are patched while somebody listens and are as before when nobody does.
    """
    mine = [(listener, threading.get_ident()) for listener in group]
    with calls_heard(group, roots):
        with _changing:
            if not listeners:
                _patches.enter()
            listeners.extend(mine)
            sort_listeners()
        try:
            yield
        finally:
            with _changing:
                for each in mine:
                    listeners.remove(each)
                sort_listeners()
                if not listeners:
                    _patches.exit()


@contextmanager
def calls_heard(group: Sequence[Listener], modules: Sequence[nn.Module]) -> Iterator[None]:
    """Tells those of ``group`` who listen to it of every forward call of ``modules`` in this thread.

    Not of those inside of backward: there activation checkpointing calls the model again, not the loop.
    """
    thread = threading.get_ident()
    begins, ends = (
        [careful(each, method) for each in group if listens_to(each, method)] for method in ("on_forward", "on_output")
    )

    def before(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if thread == threading.get_ident() and is_heard() and not inside.backward:
            for tell in begins:
                tell(root, args, kwargs)

    def after(root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if thread == threading.get_ident() and is_heard() and not inside.backward:
            for tell in ends:
                tell(root, output)

    with ExitStack() as undo:
        for module in modules:
            undo.enter_context(hearing(module, before, after))
        yield


class _Patches:
    """Everything that is replaced in torch, and how it is put back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def enter(self) -> None:
        for owner, name, wrap in _WRAPPERS:
            original = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name, None)
            if original is not None:  # a version of torch without it is not heard there
                setattr(owner, name, functools.wraps(original)(wrap(original)))
                self._undo.append(functools.partial(setattr, owner, name, original))
        for handle in (register_optimizer_step_pre_hook(_on_step), register_optimizer_step_post_hook(_on_stepped)):
            self._undo.append(handle.remove)

    def exit(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


_patches = _Patches()
_changing = threading.Lock()


def _on_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = (*args[1:], *kwargs.values())
    closure = next((each for each in given if callable(each)), None)
    if closure is None or not is_heard():
        for tell in tell_of("on_step"):
            tell(optimizer, given)
        return None
    calls = 0

    @functools.wraps(closure)
    def heard() -> Any:
        nonlocal calls
        result = closure()
        calls += 1
        for tell in tell_of("on_step") if calls == 1 else ():
            tell(optimizer, given)
        for tell in tell_of("on_closure_again") if calls > 1 else ():
            tell(optimizer)
        return result

    return tuple(heard if a is closure else a for a in args), {
        k: heard if v is closure else v for k, v in kwargs.items()
    }


def _on_stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for tell in tell_of("on_stepped"):
        tell(optimizer)


def _tell_changed() -> None:
    for tell in tell_of("on_gradients_changed"):
        tell()


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.backward or not is_heard():
            return original(tensors, *args, **kwargs)
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        names = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
        how = dict(zip(names, args)) | kwargs
        for tell in tell_of("on_backward"):
            tell(losses, how)
        inside.enter("backward")
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            inside.leave("backward")
        for tell in tell_of("on_gradients"):
            tell()
        return result

    return backward


def _wrap_tensor_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Itself a torch function: whoever listens to those can stop before it begins."""

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for tell in tell_of("on_backward_called"):
            tell()
        return original(self, *args, **kwargs)

    return backward


def _wrap_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Calls itself again through a mode that hears torch functions: that is one call."""

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("grad_outputs", "retain_graph", "create_graph")
        for tell in () if inside.grad or inside.backward else tell_of("on_autograd_grad"):
            tell(outputs, inputs, dict(zip(names, args)) | kwargs)
        inside.enter("grad")
        try:
            return original(outputs, inputs, *args, **kwargs)
        finally:
            inside.leave("grad")

    return grad


def _wrap_zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        for tell in tell_of("on_zero_grad"):
            tell(self)
        return original(self, *args, **kwargs)

    return zero_grad


def _wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        for tell in tell_of("on_scaled"):
            tell(self, outputs, scaled)
        return scaled

    return scale


def _wrap_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_(self: GradScaler, optimizer: Optimizer) -> Any:
        for tell in tell_of("on_unscale"):
            tell(self, optimizer)
        result = original(self, optimizer)
        _tell_changed()
        return result

    return unscale_


def _wrap_scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not is_heard():
            return original(self, optimizer, *args, **kwargs)
        seen: list[Optimizer] = []
        handle = optimizer.register_step_post_hook(lambda optimizer, *rest: seen.append(optimizer))
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        for tell in tell_of("on_scaler_step"):
            tell(self, optimizer, bool(seen))
        return result

    return step


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for tell in tell_of("on_scaler_update"):
            tell(self)
        return result

    return update


def _wrap_clip_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_heard():
            return original(parameters, max_norm, total_norm, *args, **kwargs)
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for tell in tell_of("on_clip"):
            tell("norm", float(max_norm), given, total_norm)
        result = original(given, max_norm, total_norm, *args, **kwargs)
        _tell_changed()
        return result

    return clip_grads_with_norm_


def _wrap_clip_value(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
        if not is_heard():
            return original(parameters, clip_value, *args, **kwargs)
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for tell in tell_of("on_clip"):
            tell("value", float(clip_value), given, None)
        result = original(given, clip_value, *args, **kwargs)
        _tell_changed()
        return result

    return clip_grad_value_


def _wrap_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside.enter("schedule")  # a SequentialLR steps others inside
        try:
            result = original(self, *args, **kwargs)
        finally:
            inside.leave("schedule")
        if not inside.schedule:
            for tell in tell_of("on_metric") if args or kwargs else ():
                tell(self, (*args, *kwargs.values())[0])
            for tell in tell_of("on_schedule"):
                tell(self)
        return result

    return step


def _wrap_iter_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        self._trainwright_ids = []  # what the sampler gave and no batch was made of yet
        original(self, loader, *args, **kwargs)
        for tell in tell_of("on_epoch"):
            tell(loader, self)

    return init


def _wrap_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Persistent workers reset an iterator instead of making one. Iterators of several workers call it when made."""

    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        self._trainwright_ids = []
        original(self, loader, first_iter)
        if not first_iter:
            for tell in tell_of("on_epoch"):
                tell(loader, self)

    return reset


def _wrap_next_index(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_index(self: Any) -> Any:
        ids = original(self)
        if hasattr(self, "_trainwright_ids"):
            self._trainwright_ids.append(ids)
        return ids

    return next_index


def _wrap_next(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_batch(self: Any) -> Any:
        begin_s = time.perf_counter()
        batch = original(self)
        waiting = getattr(self, "_trainwright_ids", None)
        ids = waiting.pop(0) if waiting else None
        for tell in tell_of("on_batch"):
            tell(self, ids, batch, time.perf_counter() - begin_s)
        return batch

    return next_batch


_Iter: Any = dataloader._BaseDataLoaderIter
_MultiIter: Any = dataloader._MultiProcessingDataLoaderIter
_WRAPPERS: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (torch.autograd, "backward", _wrap_backward),
    (torch.autograd, "grad", _wrap_grad),
    (Tensor, "backward", _wrap_tensor_backward),
    (Optimizer, "zero_grad", _wrap_zero_grad),
    (nn.Module, "zero_grad", _wrap_zero_grad),
    (GradScaler, "scale", _wrap_scale),
    (GradScaler, "unscale_", _wrap_unscale),
    (GradScaler, "step", _wrap_scaler_step),
    (GradScaler, "update", _wrap_update),
    (clip_grad, "_clip_grads_with_norm_", _wrap_clip_norm),  # what clip_grad_norm_ calls, however it was imported
    (nn.utils, "clip_grads_with_norm_", _wrap_clip_norm),
    (nn.utils, "clip_grad_value_", _wrap_clip_value),
    (lr_scheduler.LRScheduler, "step", _wrap_schedule),
    (lr_scheduler.ReduceLROnPlateau, "step", _wrap_schedule),
    (lr_scheduler.CosineAnnealingWarmRestarts, "step", _wrap_schedule),
    (lr_scheduler.SequentialLR, "step", _wrap_schedule),
    (lr_scheduler.ChainedScheduler, "step", _wrap_schedule),
    (_Iter, "__init__", _wrap_iter_init),
    (_Iter, "_next_index", _wrap_next_index),
    (_Iter, "__next__", _wrap_next),
    (_MultiIter, "_reset", _wrap_reset),
)
