"""Finds the first module whose output differs between two replays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn

from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.modules import ModuleStack
from trainwright.replay.session import ReplaySession

MAX_ELEMENTS = 2**24
"""Maximum number of elements that one trace keeps."""
Compare = Callable[[Tensor, Tensor], float]
"""Returns the distance of two tensors that should be equal."""


@dataclass
class CallTrace:
    """Records inputs and outputs of all modules in call order. ``following`` is for ``Intervention.model``.

    Each tensor is kept with the module that is responsible if it is the first to differ: for an output the module
    itself, for an input the enclosing module.
    """

    session: ReplaySession
    seen: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    _elements: int = 0

    def __post_init__(self) -> None:
        self._stack = ModuleStack(self.session.modules)

    def following(self) -> AbstractContextManager[None]:
        return self._stack.following(self._enter, self._leave)

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        around = self._stack.paths[-2] if len(self._stack.paths) > 1 else path
        self._keep(around, [args, kwargs])

    def _leave(self, path: str, module: nn.Module, output: object) -> None:
        self._keep(path, output)

    def _keep(self, path: str, value: object) -> None:
        tensors = [t.detach() for t in tensors_of(value, 3) if t.is_floating_point()]
        self._elements += sum(t.numel() for t in tensors)
        self.seen.append((path, [t.clone() for t in tensors] if self._elements < MAX_ELEMENTS else []))

    def first_difference(self, other: CallTrace, compare: Compare, limit: float) -> str | None:
        """Returns the path of the responsible module; None if the traces do not have the same calls."""
        for (path, mine), (theirs_path, theirs) in zip(self.seen, other.seen):
            if path != theirs_path or len(mine) != len(theirs):
                return None
            if any(compare(a, b) > limit for a, b in zip(mine, theirs)):
                return path
        return None
