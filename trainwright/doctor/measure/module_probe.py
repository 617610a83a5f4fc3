"""Base class of listeners that examine the modules in a few steps of the live loop."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainwright.checkpoint.names import named_modules, named_parameters
from trainwright.recorder.calls import is_compiled
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.pausable import without_modes
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.modules import ModuleStack

EARLY_STEPS = frozenset({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64})
"""Examined steps. Later, the step after every INTERVAL_STEPS-th one is examined, until FREQUENT_UNTIL_STEP."""
INTERVAL_STEPS = 32
FREQUENT_UNTIL_STEP = 512
LATER_INTERVAL_STEPS = 128
"""Interval of examined steps after FREQUENT_UNTIL_STEP. An examination takes about 10 us for each module."""
MAX_PASSES = 128  # Maximum number of examined passes per step. More passes through the same model add no information.


class ModuleProbe(Probe):
    """Keeps hooks on all modules during the training passes of examined steps.

    A compiled model is not hooked, because it would be compiled again. A sharded model is not hooked, because each rank
    has only a part. ``is_hooked``: the current or last pass is examined.
    """

    def __init__(self, watched: WatchedObjects) -> None:
        self.watched, roots = watched, watched.subject.roots
        self.modules = dict(named_modules(roots))
        self.names = {id(p): name for name, p in named_parameters(roots)}
        self.owned = {id(p) for optimizer in watched.subject.optimizers for p in owned_by(optimizer)}
        kinds = {type(each).__name__ for each in self.modules.values()}
        is_divided = any(map(is_traceable_wrapper_subclass, watched.subject.parameters))
        with_wrappers = (module for root in roots for module in root.modules())
        self._is_off = is_divided or "FullyShardedDataParallel" in kinds or any(map(is_compiled, with_wrappers))
        self.looks, self.is_looking, self.step = 0, not self._is_off, 0
        self._steps_before: int | None = None  # when the watch began
        self._open, self._is_following = ExitStack(), False
        self._passes, self.is_hooked = 0, False
        self._stack = ModuleStack({p: m for p, m in self.modules.items() if not isinstance(m, torch.jit.ScriptModule)})
        self.stack = self._stack.paths

    def begin(self, site: WatchSite) -> None:
        """Called before the first step."""

    def entered(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """A module is called in an examined step."""

    def left(self, path: str, module: nn.Module, output: object) -> None:
        """The call has ended. ``output`` is None if it raised."""

    def ended(self, step: RecordedStep) -> None:
        """An examined step has ended."""

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._is_following:
            self._stop_following()
        self.is_hooked = self.is_looking and torch.is_grad_enabled() and self._passes < MAX_PASSES
        if self.is_hooked:
            self._passes += 1
            self._is_following = True
            self._open.enter_context(self._stack.following(self._enter, self._leave, but=root))

    def on_output(self, root: nn.Module, output: object) -> None:
        if self._is_following:
            self._stop_following()

    def _stop_following(self) -> None:
        self._is_following = False
        self._open.close()

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self.failed is None:
            try:
                with without_modes():
                    self.entered(path, module, args, kwargs)
            except Exception as error:
                self.fail(error)

    def _leave(self, path: str, module: nn.Module, output: object) -> None:
        if self.failed is None:
            try:
                with without_modes():
                    self.left(path, module, output)
            except Exception as error:
                self.fail(error)

    def on_closed(self, step: RecordedStep) -> None:
        self._steps_before = step.step - 1 if self._steps_before is None else self._steps_before
        taken = step.step - self._steps_before
        self._passes = 0
        if self.is_looking:
            self._stop_following()
            self.looks += 1
            self.step = step.step
            self.ended(step)
        every = INTERVAL_STEPS if taken <= FREQUENT_UNTIL_STEP else LATER_INTERVAL_STEPS
        is_due = taken + 1 in EARLY_STEPS or (taken >= 64 and step.step % every == 0)
        self.is_looking = not self._is_off and is_due

    def end(self, error: BaseException | None) -> None:
        self._stop_following()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._open.close()  # it is not called again


def rows_of(tensor: Tensor, most: int = 8) -> Tensor:
    """Returns the first rows, each flattened to one dimension."""
    rows = tensor.detach()[:most]
    return rows.reshape(len(rows), -1)
