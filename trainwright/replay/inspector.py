"""Observes one replay: the running module, the arguments of every torch function, the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import Node

from trainwright.recorder.graph import graph_behind
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention, ReplayResult, Upto
from trainwright.replay.session import ReplaySession

# A private name of torch. Without it, calls by activation checkpointing cannot be recognized.
_current_node: Callable[[], Node | None] = getattr(torch._C, "_current_autograd_node", lambda: None)


class StepInspector:
    """Base class for observers of one replay. Call ``run`` within ``session.live()``.

    ``stack`` holds the paths of the running modules, outermost first. It is empty outside of the models.
    """

    def __init__(self, session: ReplaySession) -> None:
        self.session = session
        self.names = {id(p): n for n, p in session.parameters.items()}
        self._modules = ModuleStack(session.modules)
        self.stack = self._modules.paths
        self._quiet = False

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        """Called after each torch function, except for functions that it calls itself."""

    def on_enter(self, path: str, module: nn.Module, inputs: list[Tensor], in_backward: bool) -> None:
        """Called before a module. ``in_backward``: activation checkpointing calls it in the backward pass."""

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        """Called after a module."""

    def run(self, upto: Upto = "backward", **changes: Any) -> ReplayResult:
        """Replays the step. ``changes`` are fields of Intervention. Raises the errors of the user's code."""
        following = partial(self._modules.following, self._enter, self._leave)
        intervention = Intervention(ops=self._call, model=following, **changes)
        result = self.session.replayer.run(self.session.recorded_step, intervention, upto=upto)
        if result.error is not None:
            raise result.error
        return result

    def _call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        if not self._quiet:
            self.on_function(function_name(function), args, kwargs, result)
        return result

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        with self._without_functions():
            self.on_enter(path, module, tensors_of([args, kwargs]), _current_node() is not None)

    def _leave(self, path: str, module: nn.Module, output: object) -> None:
        if output is not None:  # None if an exception left the forward pass
            with self._without_functions():
                self.on_leave(path, module, output, _current_node() is not None)

    @contextmanager
    def _without_functions(self) -> Iterator[None]:
        """Context in which ``on_function`` is not called, for torch functions of the inspector itself."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def custom_functions_of(tensors: Iterable[Tensor]) -> list[type[Function]]:
    """Returns the user-defined autograd Functions in the graph behind these tensors."""
    return [c for c in map(_custom_function, graph_behind(tensors)) if c is not None]


def is_in_custom_function() -> bool:
    """Returns True while the backward pass of a user-defined Function runs."""
    node = _current_node()
    return node is not None and _custom_function(node) is not None


def _custom_function(node: Node) -> type[Function] | None:
    found: type[Function] | None = getattr(type(node), "_forward_cls", None)
    return None if found is None or found.__module__.startswith(("torch.", "trainwright.")) else found


def checksum(tensor: Tensor) -> Tensor:
    """Returns the sum and the sum of squares of the values, shape (2,), on the device of the tensor."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.double().flatten()
    return torch.stack([values.sum(), (values * values).sum()])
