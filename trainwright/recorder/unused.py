"""Gradients that no optimizer has used when they are dropped: the loop may have used them by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from trainwright.recorder.pausable import PausableMode
from trainwright.recorder.tape import READS_GRADIENT
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

NO_USERS = ("torch.nn.utils.clip_grad", "trainwright.")
"""Modules that read gradients and make nothing of them: a clip, and the recorder after it."""


class _Reads(PausableMode):
    """Notes whether ``.grad`` of a tensor is read while it runs, to be used."""

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
    """``are_there``: no update came after the last backward pass.

    Once a loop has dropped such gradients, it is heard whether it reads them before: for a step by hand, or a
    projection. Where ``reads`` is pushed, it must be stopped before anything else happens.
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
        """They are dropped. Returns whether they were read."""
        self.forget()
        self._are_dropped = True
        return self.reads.were_there

    def forget(self) -> None:
        """An update uses them, or nobody will."""
        self.are_there = False
        if self.reads.pushed:
            self.reads.stop()
