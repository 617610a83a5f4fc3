"""Reports direct calls of a model's parts, such as ``model.decoder(z)``, outside of calls of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from trainwright.recorder.calls import is_compiled, parts_of
from trainwright.recorder.hooks import listening_to_calls
from trainwright.recorder.listener import Listener
from trainwright.recorder.user_types import Args, Kwargs


class PartCalls(Listener):
    """Reports direct calls. Hooks stay on the parts from ``open`` to ``close``. A compiled model gets no hooks."""

    def __init__(
        self, begins: Callable[[nn.Module, Args, Kwargs], None], ends: Callable[[nn.Module, object], None]
    ) -> None:
        self._begins, self._ends = begins, ends
        self._hooks = ExitStack()
        self._known: set[int] = set()
        self.is_inside = False
        """The model itself is being called."""

    def open(self, root: nn.Module) -> None:
        """Also observes the parts of this model."""
        if id(root) not in self._known:
            self._known.add(id(root))
            if not any(map(is_compiled, root.modules())):
                self._hooks.enter_context(listening_to_calls([self], parts_of(root)))

    def close(self) -> None:
        self._hooks.close()
        self._known.clear()
        self.is_inside = False

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not self.is_inside:
            self._begins(root, args, kwargs)

    def on_output(self, root: nn.Module, output: object) -> None:
        if not self.is_inside:
            self._ends(root, output)
