"""The events of a training loop, and which listeners of a thread receive them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.errors import TrainwrightError
from trainwright.recorder.pausable import has_users_modes, without_users_modes
from trainwright.recorder.user_types import Args, Kwargs, Loader, TorchFunction
from trainwright.recorder.user_warnings import without_warnings


class Listener:
    """Receives the events of a loop. Each method is called at its event; by default it does nothing.

    A listener receives the events of the thread in which it was registered. One that raises receives no more events;
    ``failed`` is what it raised.
    """

    failed: Exception | None = None
    depth = 0
    """Of the first listener of a group: forward calls that the thread is in."""

    def fail(self, error: Exception) -> None:
        """Called with what a method has raised; after it no method is called.

        The traceback is dropped: its frames hold the tensors of the call, of which the activations are the largest.
        """
        self.failed = error.with_traceback(None)

    def on_epoch(self, loader: Loader, iterator: object) -> None: ...
    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None: ...
    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """A forward call that is not inside of another one."""

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Where autograd is off: right before ``on_forward`` of the same call."""

    def on_output(self, root: nn.Module, output: object) -> None:
        """The same call is over. ``output`` is None where it raised."""

    def on_backward_called(self) -> None: ...
    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None: ...
    def on_gradients(self) -> None: ...
    def on_gradients_changed(self) -> None:
        """The gradients were clipped, unscaled, ... by a function that is recorded."""

    def on_apply(self) -> None:
        """The loop calls a custom autograd Function."""

    def on_applied(self, apply: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> None:
        """The same call is over. ``result`` is None where it raised."""

    def on_autograd_grad(self, outputs: object, inputs: object, options: Kwargs) -> None: ...
    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None: ...
    def on_scaled(self, scaler: object, loss: object, scaled: object) -> None: ...
    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None: ...
    def on_scaler_update(self, scaler: GradScaler) -> None: ...
    def on_multiplied(self, factor: Tensor | float) -> None: ...
    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        """``by`` is norm, value, agc, or custom: then ``function`` is what clips."""

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        """Right before the update: where a closure makes the gradients, when it has made them."""

    def on_closure_again(self, optimizer: Optimizer) -> None: ...
    def on_stepped(self, optimizer: Optimizer) -> None: ...
    def on_schedule(self, scheduler: object) -> None: ...
    def on_metric(self, scheduler: object, metric: object) -> None: ...
    def on_wrapped_call(self, wrapper: nn.Module, is_synced: bool) -> None:
        """A forward call through DistributedDataParallel; ``is_synced``: outside of ``no_sync``."""

    def on_waited(self, seconds: float) -> None:
        """The ranks exchanged something before a forward pass, and this one took so long for it."""

    def on_reduce(self, tensor: Tensor, operation: object) -> None:
        """The loop calls ``all_reduce``."""

    def on_reduced(self, tensor: Tensor, seconds: float) -> None:
        """``all_reduce`` has returned; if asynchronous, the result is not there."""

    def on_mode(self, module: nn.Module, training: bool) -> None:
        """The loop calls ``train`` or ``eval`` of a module, one of the watched or not."""

    def on_state_dict(self, module: nn.Module, state: object) -> None:
        """The loop has got ``state`` from ``state_dict`` of a module."""

    def on_loaded(self, module: nn.Module, state: object) -> None: ...
    def on_saved(self, value: object) -> None:
        """The loop has called ``torch.save``."""

    def on_copied(self, tensor: Tensor) -> None:
        """A tensor is deep-copied."""

    def on_warning(self, kind: str, text: str, source: str) -> None:
        """A warning is shown; ``source`` is the line of the user's code that it came from."""

    def on_begun_again(self) -> None:
        """The step begins again because it ran out of memory. What was reported of its first try does not count."""

    def on_forked(self) -> None:
        """In a process that was forked: there nothing is heard any more."""


Methods: TypeAlias = list[tuple[Listener, Callable[..., None]]]
"""Methods to call, each with the listener that it belongs to."""
listeners: list[tuple[Listener, int]] = []
"""Each with the thread whose events it receives."""
_methods: dict[tuple[int, str], Methods] = {}
"""By thread and event: what to call. With "" for the event: an entry for each thread that has listeners."""
_muted: set[int] = set()


def tell(event: str, *arguments: object) -> None:
    """Calls the methods of this thread's listeners that hear ``event``."""
    thread = threading.get_ident()
    methods = _methods.get((thread, event))
    if methods is not None and thread not in _muted:
        call_each(methods, *arguments)


def call_each(methods: Methods, *arguments: object) -> None:
    """Calls methods of listeners: an exception in one calls ``fail`` of its listener and does not reach the loop.

    A TrainwrightError is raised on purpose and passes. Neither modes of the user's nor the tape see what the methods
    compute.
    """
    if (_len_torch_function_stack() or _len_torch_dispatch_stack()) and has_users_modes():
        with without_users_modes():
            call_each(methods, *arguments)
        return
    outer, inside.listeners = inside.listeners, True
    try:
        for listener, call in methods:
            if listener.failed is None:
                try:
                    call(*arguments)
                except TrainwrightError:
                    raise
                except Exception as error:
                    listener.fail(error)
    finally:
        inside.listeners = outer


def has_listeners() -> bool:
    """Whether this thread has listeners and is not muted."""
    thread = threading.get_ident()
    return thread not in _muted and (thread, "") in _methods


def sort_listeners() -> None:
    """Builds the table of methods anew. Must be called after each change to ``listeners``."""
    global _methods  # replaced at once: other threads may be reading it
    table: dict[tuple[int, str], Methods] = {}
    for listener, thread in listeners:
        table[thread, ""] = []
        for method in (name for name in vars(Listener) if name.startswith("on_")):
            table.setdefault((thread, method), []).extend(methods_of([listener], method))
    _methods = {key: methods for key, methods in table.items() if methods or not key[1]}


def methods_of(group: Iterable[Listener], name: str, base: type[Listener] = Listener) -> Methods:
    """Returns the method ``name`` of each listener that does not leave it as ``base`` has it."""
    heard = [each for each in group if getattr(type(each), name) is not getattr(base, name)]
    return [(each, getattr(each, name)) for each in heard]


@contextmanager
def muted() -> Iterator[None]:
    """A context in which this thread has no events and shows no warnings: a replay is not the loop."""
    thread = threading.get_ident()
    if thread in _muted:
        yield
        return
    _muted.add(thread)
    try:
        with without_warnings():
            yield
    finally:
        _muted.discard(thread)


@contextmanager
def unmuted() -> Iterator[None]:
    """A context inside of ``muted`` in which this thread has events again."""
    thread = threading.get_ident()
    was_muted = thread in _muted
    _muted.discard(thread)
    try:
        yield
    finally:
        if was_muted:
            _muted.add(thread)


class CallDepth(threading.local):
    """How many calls of backward, of autograd.grad, of a scheduler's step and of those in ``object_hooks`` this thread
    is in: they may be nested. ``listeners``: it is in a method of a listener.
    """

    backward = grad = schedule = objects = 0
    listeners = False

    def enter(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    def leave(self, name: str) -> None:
        setattr(self, name, getattr(self, name) - 1)


inside = CallDepth()
