"""Inspects one replay from inside: which module runs, the arguments of every torch function, the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import Node

from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention, ReplayResult, Upto
from trainwright.replay.session import ReplaySession

# A private name of torch. Without it no forward call is known to be one of activation checkpointing.
_current_node: Callable[[], Node | None] = getattr(torch._C, "_current_autograd_node", lambda: None)


class StepInspector:
    """Base class for what inspects one replay from inside. Call ``run`` within ``session.live()``.

    ``stack`` holds the paths of the modules that run, outermost first; it is empty in the loss.
    """

    def __init__(self, session: ReplaySession) -> None:
        self.session = session
        self.names = {id(p): n for n, p in session.parameters.items()}
        self._modules = ModuleStack(session.modules)
        self.stack = self._modules.paths
        self._quiet = False

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        """Called after a torch function, but not for the functions that it calls itself."""

    def on_enter(self, path: str, module: nn.Module, inputs: list[Tensor], in_backward: bool) -> None:
        """Called before a module. ``in_backward``: activation checkpointing runs it in the backward pass."""

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        """Called after a module."""

    def run(self, upto: Upto = "backward", **changes: Any) -> ReplayResult:
        """Runs the step again; ``changes`` are fields of Intervention. Raises what the user's code raises."""
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
        if output is not None:  # None: an exception left the forward pass
            with self._without_functions():
                self.on_leave(path, module, output, _current_node() is not None)

    @contextmanager
    def _without_functions(self) -> Iterator[None]:
        """Inside, torch functions are those of the inspector itself: ``on_function`` is not called."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def nodes_of(tensors: Iterable[Tensor]) -> list[Node]:
    """All nodes of the autograd graph behind these tensors, each once."""
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # grows while it is walked
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    """The leaf tensors that a backward pass from these would accumulate a gradient into."""
    leaves = [t for t in tensors if t.requires_grad and t.grad_fn is None]
    return leaves + [node.variable for node in nodes_of(tensors) if hasattr(node, "variable")]


def custom_functions_of(tensors: Iterable[Tensor]) -> list[type[Function]]:
    """The autograd Functions in the graph behind these tensors that neither torch nor Trainwright defines."""
    return [c for c in map(_custom_function, nodes_of(tensors)) if c is not None]


def is_in_custom_function() -> bool:
    """Whether the backward of a Function that neither torch nor Trainwright defines runs."""
    node = _current_node()
    return node is not None and _custom_function(node) is not None


def _custom_function(node: Node) -> type[Function] | None:
    found: type[Function] | None = getattr(type(node), "_forward_cls", None)
    return None if found is None or found.__module__.startswith(("torch.", "trainwright.")) else found


def checksum(tensor: Tensor) -> Tensor:
    """The sum and the sum of squares of the values, shape (2,), on the device of the tensor."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.double().flatten()
    return torch.stack([values.sum(), (values * values).sum()])
