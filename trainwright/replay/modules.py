"""Tracks the running module of the user's model with hooks, as a stack of paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

from trainwright.recorder.user_types import Args, Kwargs

Enter: TypeAlias = Callable[[str, nn.Module, Args, Kwargs], None]
Leave: TypeAlias = Callable[[str, nn.Module, object], None]


class ModuleStack:
    """Within ``following()``, ``paths`` are the paths of the running modules, outermost first."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.paths: list[str] = []
        self._modules = modules

    @property
    def innermost(self) -> str | None:
        """The path of the running module; None outside of all modules."""
        return self.paths[-1] if self.paths else None

    @contextmanager
    def following(
        self, enter: Enter | None = None, leave: Leave | None = None, but: nn.Module | None = None
    ) -> Iterator[None]:
        """Context with hooks on all modules except ``but``.

        ``but`` is for a caller that leaves the context in a hook of that module, where its hooks cannot be removed.

        ``enter`` is called with a module's arguments after it is pushed, ``leave`` with its output after it is popped.
        They are no attributes, because they may be methods of an object that holds this one: a reference cycle.
        """
        self.paths.clear()
        handles = []
        for path, module in self._modules.items():
            if module is but:
                continue
            handles.append(module.register_forward_pre_hook(self._on_enter(path, enter), with_kwargs=True))
            # Also if an exception leaves the forward pass, as early stop in a checkpoint's backward pass does.
            handles.append(module.register_forward_hook(self._on_leave(path, leave), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_enter(self, path: str, enter: Enter | None) -> Callable[[nn.Module, Args, Kwargs], None]:
        def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            self.paths.append(path)
            if enter is not None:
                enter(path, module, args, kwargs)

        return hook

    def _on_leave(self, path: str, leave: Leave | None) -> Callable[[nn.Module, Args, object], None]:
        def hook(module: nn.Module, args: Args, output: object) -> None:
            while path in self.paths and self.paths.pop() != path:
                pass
            if leave is not None:
                leave(path, module, output)

        return hook
