"""Steps of a watched loop that are over, until their numbers are read: on a GPU some steps later."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from trainwright.recorder.listener import call_each, methods_of
from trainwright.recorder.noting import NotedStep
from trainwright.recorder.numbers import Numbers, begin_reading
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.veto import Veto
from trainwright.state.spikes import SpikeDetector

ReadStep: TypeAlias = tuple[RecordedStep, Numbers]


class UnreadSteps:
    """Calls ``on_read`` of the probes with each step and its numbers, oldest first; before that ``vetoed``, where the
    device has left its update out.

    ``finds_spikes``: a gradient norm that is one is written to the values of its step.
    """

    def __init__(
        self, probes: Sequence[Probe], veto: Veto, vetoed: Callable[[RecordedStep], None], *, finds_spikes: bool
    ) -> None:
        self._methods, self._finds_spikes = methods_of(probes, "on_read", Probe), finds_spikes
        self._veto, self._vetoed = veto, vetoed
        self._steps: deque[tuple[RecordedStep, Callable[[], Numbers]]] = deque()
        self._detectors: dict[tuple[int, int], SpikeDetector] = defaultdict(SpikeDetector)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: RecordedStep) -> None:
        """Starts to read the numbers of a step that is over."""
        noted = isinstance(step, NotedStep) and step.is_noted
        self._steps.append((step, step.numbers if noted else begin_reading(step)))  # type: ignore[attr-defined]

    def is_newest_finite(self) -> bool:
        """Waits for the numbers, where they are not noted."""
        step, read = self._steps[-1]
        return step.are_finite if isinstance(step, NotedStep) and step.is_noted else read().are_finite

    def read(self, count: int) -> list[ReadStep]:
        """Takes so many of the oldest."""
        steps = [self._read_oldest() for _ in range(count)]
        if self._finds_spikes:
            self._find_spikes(steps)
        return steps

    def _read_oldest(self) -> ReadStep:
        step, read = self._steps.popleft()
        numbers = read()
        if self._veto.was_vetoed_on_device(step, numbers.norm):
            self._vetoed(step)
        call_each(self._methods, step, numbers)
        return step, numbers

    def _find_spikes(self, steps: Sequence[ReadStep]) -> None:
        """Of the norms before clipping: the players of a GAN have norms of their own."""
        norms: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for step, numbers in steps:
            norm = numbers.clips[-1] if numbers.clips else numbers.norm
            if math.isfinite(norm) and not is_bad(step, numbers):
                norms[step.trained][step.step] = norm
        for who, of_steps in norms.items():
            found = self._detectors[who].detect_all(of_steps)
            for step, _ in steps if found else ():
                if (spike := found.get(step.step)) is not None:
                    step.values["spike"] = [spike.grad_norm, spike.usual, spike.initial, "warn"]


def is_bad(step: RecordedStep, numbers: Numbers) -> bool:
    """Whether a step is not finite, or its update was left out for another reason than a list of samples to skip."""
    values = step.values
    return not numbers.are_finite or "nonfinite" in values or values.get("vetoed", "skip list") != "skip list"
