"""A replay with a guide: which module runs, what every torch function is given and gives, and the graph behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.recorder.program import tensors_of
from trainwright.replay.replayer import Intervention, ReplayResult, Upto
from trainwright.replay.session import ReplaySession

# A private name of torch; without it no forward call is known to be a recomputation.
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)


class Tour:
    """Base of what looks at one replay from inside. ``go`` is called within ``bench.live()``.

    ``stack`` holds the paths of the modules that run, outermost first; it is empty in the loss.
    """

    def __init__(self, bench: ReplaySession) -> None:
        self.bench = bench
        self.stack: list[str] = []
        self.names = {id(p): n for p, n in zip(bench.player.subject.parameters, bench.player.names)}
        self._quiet = False

    def on_function(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """A torch function has run. Not told of those that run inside of it."""

    def on_enter(self, path: str, module: nn.Module, given: list[Tensor], recomputed: bool) -> None:
        """A module begins; ``recomputed``: in the backward pass, under checkpointing."""

    def on_leave(self, path: str, module: nn.Module, output: Any, recomputed: bool) -> None:
        """A module is done."""

    def go(self, upto: Upto = "backward", **edit: Any) -> ReplayResult:
        """The step once more. Raises what the user's code raises."""
        changed = Intervention(ops=self._around, model=self._hooked, **edit)
        played = self.bench.player.play(self.bench.segment, changed, upto=upto)
        if played.error is not None:
            raise played.error
        return played

    def _around(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not self._quiet:
            self.on_function(getattr(function, "__name__", "?"), args, kwargs, result)
        return result

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = [h for path, module in self.bench.modules.items() for h in self._hooks(path, module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append(path)
            with self._unheard():
                self.on_enter(path, module, tensors_of([args, kwargs]), _current_node() is not None)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while path in self.stack and self.stack.pop() != path:
                pass
            if output is not None:
                with self._unheard():
                    self.on_leave(path, module, output, _current_node() is not None)

        # Also when the forward is left by an exception: a checkpoint's recomputation stops early by one.
        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Every node of the graph behind these tensors, once."""
    todo = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(todo)
    for node in todo:  # grows while it is walked
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return todo


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that a backward pass from these would give a gradient to."""
    leaves = [t for t in tensors if t.requires_grad and t.grad_fn is None]
    return leaves + [node.variable for node in nodes_of(tensors) if hasattr(node, "variable")]


def checksum(tensor: Tensor) -> Tensor:
    """Two sums that tell whether the values are still the same; stays on the device."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.double().flatten()
    return torch.stack([values.sum(), (values * values).sum()])
