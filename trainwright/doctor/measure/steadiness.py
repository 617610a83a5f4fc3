"""Observes repeated random states at the start of steps, and steps that write to their input."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.doctor.facts.steadiness import SteadinessFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Constant, RecordedStep, constants_of

MAX_PENDING_REPEATS = 4  # Number of repeats after which the facts are reported before the next examination
EVERY_STEP_UNTIL = 64
"""All steps until this one are examined. Later, every INTERVAL_STEPS-th step is, and as many after a repetition."""
INTERVAL_STEPS = 8
MAX_STATES = 4096


@dataclass(frozen=True, slots=True)
class _Begin:
    """The states of the CPU and device generators at the start of a step."""

    step: int
    state: Tensor
    on_device: Tensor | None

    def has_drawn(self) -> bool:
        """Returns True if numbers were drawn since."""
        if not torch.equal(self.state, torch.default_generator.get_state()):
            return True
        return self.on_device is not None and not torch.equal(self.on_device, torch.cuda.get_rng_state())

    def differs(self, other: _Begin | None) -> bool:
        """Returns True if the CPU generator is in another state than at the start of the other step."""
        return other is not None and not torch.equal(self.state, other.state)

    def digest(self) -> int:
        state = zlib.crc32(self.state.numpy().data)
        return state if self.on_device is None else state << 32 | zlib.crc32(self.on_device.numpy().data)


class Steadiness(Probe):
    """Observes random states and inputs, about 10 us a step until EVERY_STEP_UNTIL. ``urgent``: states repeat."""

    name = SteadinessFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._steps, self._close_until = 0, EVERY_STEP_UNTIL
        self._draws = False
        self._before: _Begin | None = None  # of the previous examined step
        self._states: dict[int, int] = {}
        self._repeats: list[tuple[int, int]] = []
        self._num_repeats = 0
        self._written = self._written_views = self._since_written = 0

    def _is_due(self, step: int) -> bool:
        return step <= self._close_until or step % INTERVAL_STEPS == 0

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        if not self._is_due(step.step) or not step.calls:
            return
        now = _Begin(step.step, *step.calls[0].rng)
        if now.has_drawn() or now.differs(self._before):  # else nothing is drawn, and the state stays the same
            self._record_state(now)
        self._before = now
        given = [each for call in step.calls for each in constants_of((call.args, call.kwargs))]
        self._record_writes(given)

    def _record_state(self, begin: _Begin) -> None:
        """Records the state of a step that has drawn numbers."""
        self._draws = True
        state = begin.digest()
        first = self._states.setdefault(state, begin.step)
        if first != begin.step:
            self._num_repeats += 1
            self._repeats = self._repeats or [(begin.step, first)]
            self.urgent = self.urgent or self._num_repeats == MAX_PENDING_REPEATS
            self._close_until = max(self._close_until, begin.step + INTERVAL_STEPS)
        elif len(self._states) > MAX_STATES:
            del self._states[next(iter(self._states))]

    def _record_writes(self, given: list[Constant]) -> None:
        changed = [each for each in given if not each.is_unchanged]
        if changed:
            self._written += 1
            self._written_views += any(each.tensor._base is not None for each in changed)
            self._since_written = self._since_written or self._steps

    def facts(self) -> SteadinessFacts:
        self.urgent = False
        since, first = self._repeats[0] if self._repeats else (0, 0)
        return SteadinessFacts(
            steps=self._steps,
            draws=self._draws,
            repeats=self._num_repeats,
            since_repeat=since,
            repeated_step=first,
            written=self._written,
            written_views=self._written_views,
            since_written=self._since_written,
        )
