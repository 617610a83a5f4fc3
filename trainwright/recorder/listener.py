"""The events of a training loop, and the listeners of each thread."""

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
    """Receives the events of a loop. Each method is called at its event and does nothing by default.

    A listener receives the events of the thread in which it was registered. A listener that raises receives no more
    events; ``failed`` is its exception.
    """

    failed: Exception | None = None
    is_paused = False
    """True: its methods are not called."""
    depth = 0
    """For the first listener of a group: depth of nested forward calls in this thread."""

    def fail(self, error: Exception) -> None:
        """Called with the exception of a method. Afterwards no method is called.

        The traceback is dropped, because its frames hold the tensors of the call, including large activations.
        """
        self.failed = error.with_traceback(None)

    def on_epoch(self, loader: Loader, iterator: object) -> None: ...
    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None: ...
    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Called before a forward call that is not nested in another one."""

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Called right before ``on_forward`` of the same call if autograd is off."""

    def on_output(self, root: nn.Module, output: object) -> None:
        """Called after the forward call. ``output`` is None if the call raised."""

    def on_backward_called(self) -> None: ...
    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None: ...
    def on_gradients(self) -> None: ...
    def on_gradients_changed(self) -> None:
        """Called after a recorded function clipped, unscaled or otherwise changed the gradients."""

    def on_apply(self) -> None:
        """Called before a custom autograd Function."""

    def on_applied(self, apply: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> None:
        """Called after a custom autograd Function. ``result`` is None if it raised."""

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
        """Called before a clip at ``at``. ``by`` is norm, value, agc, or custom: a clip by the user's ``function``.

        ``norm`` is the gradient norm, if known.
        """

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        """Called right before the update; with a closure, after it has made the gradients."""

    def on_closure_again(self, optimizer: Optimizer) -> None: ...
    def on_stepped(self, optimizer: Optimizer) -> None: ...
    def on_schedule(self, scheduler: object) -> None: ...
    def on_metric(self, scheduler: object, metric: object) -> None: ...
    def on_wrapped_call(self, wrapper: nn.Module, is_synced: bool) -> None:
        """Called for a forward call through DistributedDataParallel. ``is_synced``: outside of ``no_sync``."""

    def on_waited(self, seconds: float) -> None:
        """Called after DistributedDataParallel has prepared a forward pass, with communication, in ``seconds``."""

    def on_reduce(self, tensor: Tensor, operation: object) -> None:
        """Called before the loop's call of ``all_reduce``."""

    def on_reduced(self, tensor: Tensor, seconds: float) -> None:
        """Called after ``all_reduce`` has returned. An asynchronous result may be pending."""

    def on_mode(self, module: nn.Module, training: bool) -> None:
        """Called when the loop calls ``train`` or ``eval`` of any module."""

    def on_state_dict(self, module: nn.Module, state: object) -> None:
        """Called when the loop has received ``state`` from ``state_dict`` of a module."""

    def on_loaded(self, module: nn.Module, state: object) -> None: ...
    def on_saved(self, value: object) -> None:
        """Called after ``torch.save``."""

    def on_seeded(self, generator: str, is_restored: bool) -> None:
        """Called after the loop has seeded the default generator of torch, numpy or random, or restored its state."""

    def on_copied(self, tensor: Tensor) -> None:
        """Called when a tensor is deep-copied."""

    def on_begun_again(self) -> None:
        """Called when the step begins again after running out of memory. Earlier reports of the step do not count."""

    def on_forked(self) -> None:
        """Called in a forked process, in which there are no further events."""


Methods: TypeAlias = list[tuple[Listener, Callable[..., None]]]
"""Methods to call, each with its listener."""
listeners: list[tuple[Listener, int]] = []
"""The listeners, each with the thread whose events it receives."""
_methods: dict[tuple[int, str], Methods] = {}
"""Methods by thread and event. The event "" marks a thread with listeners."""
_changing = threading.RLock()
_muted: set[int] = set()
_only: dict[int, list[Listener]] = {}
"""By thread: the listeners that receive all of its events, while its other listeners receive none."""


def tell(event: str, *arguments: object) -> None:
    """Calls the methods of this thread's listeners for ``event``."""
    thread = threading.get_ident()
    methods = _methods.get((thread, event))
    if methods is not None and thread not in _muted:
        call_each(methods, *arguments)


def call_each(methods: Methods, *arguments: object) -> None:
    """Calls methods of listeners. An exception in one calls ``fail`` of its listener and does not reach the loop.

    A TrainwrightError is raised, because it is meant to end the loop. The torch modes of the user and the tape do not
    see operations inside the methods.
    """
    if (_len_torch_function_stack() or _len_torch_dispatch_stack()) and has_users_modes():
        with without_users_modes():
            call_each(methods, *arguments)
        return
    if inside.catch_up is not None:
        inside.catch_up()
    outer, inside.listeners = inside.listeners, True
    try:
        for listener, call in methods:
            if listener.failed is None and not listener.is_paused:
                try:
                    call(*arguments)
                except TrainwrightError:
                    raise
                except Exception as error:
                    listener.fail(error)
    finally:
        inside.listeners = outer


def has_listeners() -> bool:
    """Returns True if this thread has listeners and is not muted."""
    thread = threading.get_ident()
    return thread not in _muted and (thread, "") in _methods


def is_muted() -> bool:
    """Returns True if no events of this thread are reported now."""
    return threading.get_ident() in _muted


@contextmanager
def changing_listeners() -> Iterator[None]:
    """Context in which to change ``listeners`` or ``_only``. Rebuilds the table of methods at its end."""
    with _changing:
        yield
        sort_listeners()


def sort_listeners() -> None:
    """Rebuilds the table of methods."""
    global _methods  # replaced at once because other threads may be reading it
    table: dict[tuple[int, str], Methods] = {}
    chosen = [each for each in listeners if each[1] not in _only]
    chosen += [(listener, thread) for thread, group in _only.items() for listener in group]
    for listener, thread in chosen:
        table[thread, ""] = []
        for method in (name for name in vars(Listener) if name.startswith("on_")):
            table.setdefault((thread, method), []).extend(methods_of([listener], method))
    _methods = {key: methods for key, methods in table.items() if methods or not key[1]}


def methods_of(group: Iterable[Listener], name: str, base: type[Listener] = Listener) -> Methods:
    """Returns the method ``name`` of each listener that overrides it."""
    heard = [each for each in group if getattr(type(each), name) is not getattr(base, name)]
    return [(each, getattr(each, name)) for each in heard]


@contextmanager
def muted() -> Iterator[None]:
    """Context of a replay, which must not be recorded: this thread has no events and shows no warnings."""
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


def mute() -> None:
    """Ends the events of this thread until ``unmute``. Unlike ``muted``, it does not hide warnings."""
    _muted.add(threading.get_ident())


def unmute() -> None:
    """Begins the events of this thread again."""
    _muted.discard(threading.get_ident())


@contextmanager
def only(group: list[Listener]) -> Iterator[None]:
    """Context in which the events of this thread reach only ``group``, also inside of ``muted``."""
    thread = threading.get_ident()
    was_muted, outer = thread in _muted, inside.only
    with changing_listeners():
        _only[thread], inside.only = group, group[0]
    _muted.discard(thread)
    try:
        yield
    finally:
        if was_muted:
            _muted.add(thread)
        with changing_listeners():
            del _only[thread]
        inside.only = outer


class CallDepth(threading.local):
    """Depth of nested calls in this thread: backward, autograd.grad, a scheduler's step, and those in ``object_hooks``.

    ``listeners``: a method of a listener is running. ``only``: the first listener of the group that alone
    receives events. ``catch_up``: reports steps that were not reported yet; called before the next event.
    """

    backward = grad = schedule = objects = 0
    listeners = False
    only: Listener | None = None
    catch_up: Callable[[], None] | None = None

    def before_next_event(self, call: Callable[[], None] | None) -> None:
        self.catch_up = call

    def enter(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    def leave(self, name: str) -> None:
        setattr(self, name, getattr(self, name) - 1)


inside = CallDepth()
