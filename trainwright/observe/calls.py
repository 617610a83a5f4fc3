"""Hooks that hear the forward calls of a root module, and that a copy or a pickle of it does not take along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


class _Ear:
    """A hook on one module. What is called while it is being compiled must leave no trace in the graph."""

    def __init__(self, root: nn.Module, heard: Callable[[nn.Module, Any, Any], None]) -> None:
        self._root, self._heard = root, heard

    def __call__(self, module: nn.Module, args: Any, third: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._root:  # a replica of DataParallel has our hook too
            self._heard(module, args, third)

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
    handles = (
        root.register_forward_pre_hook(_Ear(root, before), with_kwargs=True),
        root.register_forward_hook(_Ear(root, after), always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
