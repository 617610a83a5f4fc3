"""Tracks results of ``state_dict()`` that a loop holds."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from trainwright.doctor.facts.calls import KeptFacts, KeptState
from trainwright.recorder.callers import caller
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep

MAX_STATES = 64
MAX_LOADS = 8  # Number of loads, and of changed states, that are kept
TENSORS_COMPARED = 4  # Number of tensors that are compared. An update changes all of them.
MIN_AGE_STEPS = 20
"""Minimum age in steps of the only state that is held to the end. A newer one may be a leftover variable."""


@dataclass
class _Taken:
    """A dictionary of live tensors. ``is_done``: it was already copied or saved with its original values."""

    state: weakref.ref[dict[str, object]]
    tensors: tuple[Tensor, ...]
    versions: int
    step: int
    source: str | None
    is_done: bool = False

    @property
    def has_changed(self) -> bool:
        return sum(each._version for each in self.tensors) != self.versions


class KeptStates(Probe):
    """Records the dictionaries that ``state_dict`` of a watched model returned, and their use."""

    name = KeptFacts.experiment
    hears_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots, self._steps = watched.subject.roots, 0
        self._taken: list[_Taken] = []
        self._found = KeptFacts()

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step

    def on_state_dict(self, module: nn.Module, state: object) -> None:
        if not isinstance(state, dict) or type(state) is dict or not any(module is root for root in self._roots):
            return
        live = {p.data_ptr() for p in module.parameters()}
        held = tuple(each for each in state.values() if isinstance(each, Tensor) and each.data_ptr() in live)[
            :TENSORS_COMPARED
        ]
        if held:
            self._found.taken += 1
            self._taken = [each for each in self._taken if each.state() is not None][-MAX_STATES:]
            versions = sum(each._version for each in held)
            self._taken.append(_Taken(weakref.ref(state), held, versions, self._steps, caller()))

    def on_copied(self, tensor: Tensor) -> None:
        for each in self._taken:
            each.is_done |= any(tensor is one for one in each.tensors) and not each.has_changed

    def on_saved(self, value: object) -> None:
        self._use(value, "save")

    def on_loaded(self, module: nn.Module, state: object) -> None:
        self._use(state, "load")
        found = self._found
        if self._steps and len(found.from_itself) < MAX_LOADS and _is_from(module, state):
            names = {id(each): name for root in self._roots for name, each in root.named_modules()}
            found.loaded_module = names.get(id(module)) or type(module).__name__
            found.from_itself = (*found.from_itself, self._steps)
            found.loaded_at = found.loaded_at or caller()
            self.urgent = self.urgent or len(found.from_itself) == 2

    def _use(self, value: object, how: str, depth: int = 3) -> None:
        for each in self._taken:
            if each.state() is value:
                self._record_use(each, how)
                each.is_done = True
                return
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for one in list(inner)[:MAX_STATES] if depth else ():
            self._use(one, how, depth - 1)

    def _record_use(self, taken: _Taken, how: str) -> None:
        if taken.has_changed and not taken.is_done:
            kept = KeptState(taken.step, self._steps, how, taken.source)
            self._found.changed = (*self._found.changed, kept)[:MAX_LOADS]
            self.urgent = True

    def end(self, error: BaseException | None) -> None:
        """States that still exist were kept for use after the loop, if they are older than the last few."""
        steps = [each.step for each in self._taken]
        usual = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else MIN_AGE_STEPS / 1.5
        for each in self._taken:
            if each.state() is not None and self._steps - each.step > 1.5 * max(usual, 1):
                self._record_use(each, "")
        self._taken = []

    def facts(self) -> KeptFacts | None:
        self.urgent = False
        return self._found if self._steps else None


def _is_from(module: nn.Module, state: object) -> bool:
    """Returns True if all tensors of ``state`` are those of the module, so that loading it changes nothing."""
    tensors = list(state.values())[:64] if isinstance(state, Mapping) else []
    own = {each.data_ptr() for each in (*module.parameters(), *module.buffers()) if each.numel()}
    return bool(own and tensors) and all(
        isinstance(t, Tensor) and (t.data_ptr() in own or not t.numel()) for t in tensors[:64]
    )
