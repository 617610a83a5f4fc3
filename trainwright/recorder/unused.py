"""Tracks gradients that are dropped before an optimizer has used them. The loop may have used them itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from trainwright.recorder.pausable import PausableMode
from trainwright.recorder.tape import READS_GRADIENT
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

IGNORED_MODULES = ("torch.nn.utils.clip_grad", "trainwright.")
"""Modules that read gradients without using them: gradient clipping and Trainwright."""


class _GradientReads(PausableMode):
    """Records whether ``.grad`` of a tensor is read, except by IGNORED_MODULES, while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.was_read = False

    def __torch_function__(
        self, function: TorchFunction, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if function == READS_GRADIENT and not self.was_read:
            self.was_read = _uses_gradients(sys._getframe(1))
        return function(*args, **(kwargs or {}))


def _uses_gradients(frame: FrameType) -> bool:
    return not str(frame.f_globals.get("__name__")).startswith(IGNORED_MODULES)


class UnusedGradients:
    """Gradients since the last update. ``are_there``: no update followed the last backward pass.

    After a loop has dropped unused gradients once, reads of ``.grad`` are recorded: the loop may update weights itself,
    or project gradients. While ``reads`` is pushed, it must be stopped before another mode is pushed.
    """

    def __init__(self) -> None:
        self.are_there = self._are_dropped = False
        self.reads = _GradientReads()

    def on_gradients(self) -> None:
        self.are_there = True
        if self._are_dropped:
            self.reads.was_read = False
            self.reads.start()

    def on_zero_grad(self) -> bool:
        """Called when the gradients are dropped. Returns True if they were read."""
        self.forget()
        self._are_dropped = True
        return self.reads.was_read

    def forget(self) -> None:
        """Called when an update has used the gradients, or when no update will use them."""
        self.are_there = False
        if self.reads.pushed:
            self.reads.stop()
