"""Who listens to a loop, and what can be heard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.errors import TrainwrightError


class Listener:
    """What a loop can be heard to do. Each method is called right when it happens and does nothing by itself.

    It hears the thread that it began to listen in. One that raises is told nothing any more; ``failed`` says why.
    """

    failed: Exception | None = None

    def fail(self, error: Exception) -> None:
        """It has raised: from here on it is told nothing."""
        self.failed = error

    def on_epoch(self, loader: Any, iterator: Any) -> None: ...
    def on_batch(self, iterator: Any, ids: Any, batch: Any, wait_s: float) -> None: ...
    def on_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def on_output(self, root: nn.Module, output: Any) -> None: ...
    def on_backward_called(self) -> None: ...
    def on_backward(self, losses: tuple[Tensor, ...], how: dict[str, Any]) -> None: ...
    def on_gradients(self) -> None: ...
    def on_gradients_changed(self) -> None:
        """Right after clipping, unscaling, ... has changed them."""

    def on_autograd_grad(self, outputs: Any, inputs: Any, how: dict[str, Any]) -> None: ...
    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None: ...
    def on_scaled(self, scaler: Any, given: Any, scaled: Any) -> None: ...
    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None: ...
    def on_scaler_update(self, scaler: GradScaler) -> None: ...
    def on_multiplied(self, factor: Any) -> None: ...
    def on_clip(self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: Any = None) -> None:
        """``by`` is norm, value, agc, or custom: then ``function`` is what clips."""

    def on_step(self, optimizer: Optimizer, args: tuple[Any, ...]) -> None:
        """Right before the update: where a closure makes the gradients, when it has made them."""

    def on_closure_again(self, optimizer: Optimizer) -> None: ...
    def on_stepped(self, optimizer: Optimizer) -> None: ...
    def on_schedule(self, scheduler: Any) -> None: ...
    def on_metric(self, scheduler: Any, metric: Any) -> None: ...


listeners: list[tuple[Listener, int]] = []
"""With the thread that each one hears."""
_who: dict[tuple[int, str], list[Callable[..., None]]] = {}
"""By thread and method: those who listen to it, and do not just inherit it."""
_muted: set[int] = set()


def tell_of(method: str) -> Sequence[Callable[..., None]]:
    """Whom of this thread's listeners to tell."""
    thread = threading.get_ident()
    return () if thread in _muted else _who.get((thread, method), ())


def is_heard() -> bool:
    """Whether anybody listens to this thread."""
    thread = threading.get_ident()
    return thread not in _muted and (thread, "") in _who


def sort_listeners() -> None:
    """After a change to ``listeners``. Other threads may be telling theirs."""
    global _who
    who: dict[tuple[int, str], list[Callable[..., None]]] = {}
    for listener, thread in listeners:
        who[thread, ""] = []
        for method in (name for name in vars(Listener) if name.startswith("on_")):
            if listens_to(listener, method):
                who.setdefault((thread, method), []).append(careful(listener, method))
    _who = who


def listens_to(listener: Listener, method: str) -> bool:
    """Whether it does not just inherit the method that does nothing."""
    return getattr(type(listener), method) is not getattr(Listener, method)


def careful(listener: Listener, method: str) -> Callable[..., None]:
    """A listener's mistake is not the loop's: what it raises ends its listening, but for what we raise on purpose."""
    tell = getattr(listener, method)

    def told(*args: Any) -> None:
        if listener.failed is None:
            try:
                tell(*args)
            except TrainwrightError:
                raise
            except Exception as error:
                listener.fail(error)

    return told


@contextmanager
def muted() -> Iterator[None]:
    """What is done inside is heard by nobody: a replay is not the loop."""
    thread = threading.get_ident()
    if thread in _muted:
        yield
        return
    _muted.add(thread)
    try:
        yield
    finally:
        _muted.discard(thread)


@contextmanager
def heard_again() -> Iterator[None]:
    """Inside of ``muted``: what is done here is heard after all."""
    thread = threading.get_ident()
    was_muted = thread in _muted
    _muted.discard(thread)
    try:
        yield
    finally:
        if was_muted:
            _muted.add(thread)


class CallDepth(threading.local):
    """How deep this thread is in functions that call themselves, or others that are heard too."""

    backward = grad = schedule = 0

    def enter(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    def leave(self, name: str) -> None:
        setattr(self, name, getattr(self, name) - 1)


inside = CallDepth()
