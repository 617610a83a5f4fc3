"""Tracks gradients that no optimizer has used before they are dropped: the loop may have used them by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from trainwright.recorder.pausable import PausableMode
from trainwright.recorder.tape import READS_GRADIENT
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

NO_USERS = ("torch.nn.utils.clip_grad", "trainwright.")
"""Modules that read gradients without using them: a clip, and the recorder after it."""


class _Reads(PausableMode):
    """Records whether ``.grad`` of a tensor is read for use while the mode runs."""

    def __init__(self) -> None:
        super().__init__()
        self.were_there = False

    def __torch_function__(
        self, function: TorchFunction, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if function == READS_GRADIENT and not self.were_there:
            self.were_there = _is_a_user(sys._getframe(1))
        return function(*args, **(kwargs or {}))


def _is_a_user(frame: FrameType) -> bool:
    return not str(frame.f_globals.get("__name__")).startswith(NO_USERS)


class UnusedGradients:
    """Gradients since the last update. ``are_there``: no update followed the last backward pass.

    Once a loop has dropped such gradients, later reads before a drop are recorded: the loop may step by hand, or
    project gradients. If ``reads`` is pushed, it must be stopped before anything else happens.
    """

    def __init__(self) -> None:
        self.are_there = self._are_dropped = False
        self.reads = _Reads()

    def on_gradients(self) -> None:
        self.are_there = True
        if self._are_dropped:
            self.reads.were_there = False
            self.reads.start()

    def on_zero_grad(self) -> bool:
        """Called when they are dropped. Returns True if they were read."""
        self.forget()
        self._are_dropped = True
        return self.reads.were_there

    def forget(self) -> None:
        """Called when an update uses them, or nothing will."""
        self.are_there = False
        if self.reads.pushed:
            self.reads.stop()
