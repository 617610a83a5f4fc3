"""Finds random states that repeat."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from trainwright.doctor.facts.calls import SteadinessFacts
from trainwright.doctor.measure.tensors import random_state
from trainwright.recorder.callers import caller
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep

MAX_PENDING_REPEATS = 4  # Number of repeats after which the facts are reported before the next examination
EVERY_STEP_UNTIL = 64
"""All steps until this one are examined. Later, every INTERVAL_STEPS-th, and the INTERVAL_STEPS after a repetition."""
INTERVAL_STEPS = 8
MAX_STATES = 4096


class Steadiness(Probe):
    """Observes random states, about 10 us a step until EVERY_STEP_UNTIL. ``urgent``: states repeat."""

    name = SteadinessFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._found = SteadinessFacts()
        self._device = next((p.device for p in watched.subject.parameters), torch.device("cpu"))
        self._close_until = EVERY_STEP_UNTIL
        self._before: int | None = None  # state at the start of the previous examined step
        self._drew = False  # whether that step drew numbers
        self._states: dict[int, int] = {}  # the first step that began in each state
        self._fresh: dict[str, int] = {}  # digests of the states right after they were seeded in this step
        self._drawn: dict[str, int] = {}  # those at the end of the step before, if numbers were drawn from them
        self._alike = 0

    def on_seeded(self, generator: str, is_restored: bool) -> None:
        if is_restored:
            self._fresh.pop(generator, None)
        else:
            self._found.seeded_at = caller()
            self._fresh[generator] = _STATES[generator]()

    def on_closed(self, step: RecordedStep) -> None:
        if self._fresh or self._drawn:
            self._compare_seeded()
        if not step.calls or (step.step > self._close_until and step.step % INTERVAL_STEPS):
            return
        begin, on_device = step.calls[0].rng
        state = _digest(begin, on_device)
        now = _digest(torch.default_generator.get_state(), None if on_device is None else random_state(self._device))
        draws = state != now
        is_continued = state == self._before and not self._drew  # nothing has been drawn since the step before
        if not is_continued and (draws or self._before is not None):
            self._record(state, step.step)
        self._before, self._drew = state, draws

    def _compare_seeded(self) -> None:
        """Compares what was drawn from the generators that were seeded in this step with the step before."""
        drawn = {name: now for name, seeded in self._fresh.items() if (now := _STATES[name]()) != seeded}
        self._alike = self._alike + 1 if drawn and drawn == self._drawn else 0
        self._found.seeded_alike = max(self._found.seeded_alike, self._alike)
        self._drawn, self._fresh = drawn, {}

    def _record(self, state: int, step: int) -> None:
        """Records the state of a step that has drawn numbers."""
        found, first = self._found, self._states.setdefault(state, step)
        found.draws = True
        if first != step:
            found.repeats += 1
            if found.repeats == 1:
                found.since_repeat, found.repeated_step = step, first
            self.urgent = self.urgent or found.repeats == MAX_PENDING_REPEATS
            self._close_until = max(self._close_until, step + INTERVAL_STEPS)
        elif len(self._states) > MAX_STATES:
            del self._states[next(iter(self._states))]

    def facts(self) -> SteadinessFacts:
        self.urgent = False
        return self._found


def _state_of_numpy() -> int:
    inner = numpy.random.get_state(legacy=False)["state"]
    return hash((zlib.crc32(inner["key"].data), inner["pos"]))


_STATES: dict[str, Callable[[], int]] = {
    "torch": lambda: zlib.crc32(torch.default_generator.get_state().numpy().data),
    "numpy": _state_of_numpy,
    "random": lambda: hash(random.getstate()),
}


def _digest(state: Tensor, on_device: Tensor | None) -> int:
    digest = zlib.crc32(state.numpy().data)
    return digest if on_device is None else digest << 32 | zlib.crc32(on_device.numpy().data)
