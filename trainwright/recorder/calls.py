"""Hooks that hear the forward calls of a root module, and that a copy or a pickle of it does not take along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


class Ear:
    """A hook on one module. What is called while it is being compiled must leave no trace in the graph."""

    is_recorders = True  # not one of the loop's own hooks

    def __init__(self, root: nn.Module, heard: Callable[..., None]) -> None:
        self._root, self._heard = root, heard

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._root:  # a replica of DataParallel has our hook too
            self._heard(module, *given)

    def __reduce__(self) -> Any:
        """In a copy and in a pickle: something of Python's own that takes any arguments and does nothing."""
        return getattr, (nullcontext(), "__exit__")


@contextmanager
def hearing(
    root: nn.Module,
    before: Callable[[nn.Module, Any, Any], None],
    after: Callable[[nn.Module, Any, Any], None],
) -> Iterator[None]:
    """Calls ``before(root, args, kwargs)`` and ``after(root, args, output)`` around every forward call.

    Where a call raises, ``after`` is given None for its output.
    """
    last = root.register_forward_hook(Ear(root, after), always_call=True)

    def begin(root: nn.Module, args: Any, kwargs: Any) -> None:
        hooks: Any = root._forward_hooks  # an OrderedDict
        hooks.move_to_end(last.id)  # the loop's own hooks belong to the call, also those that came later
        before(root, args, kwargs)

    first = root.register_forward_pre_hook(Ear(root, begin), with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()


def parts_of(root: nn.Module) -> list[nn.Module]:
    """The modules right inside of it that own parameters and can be called."""
    found = []
    for child in root.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += parts_of(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found
