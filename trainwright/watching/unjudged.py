"""Steps of our own engine that are over: before they are judged, and what the log keeps of most of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainwright.engine.spikes import SpikeDecision
from trainwright.recorder.inputs import InputRing, StepInputs
from trainwright.recorder.numbers import Numbers, as_record
from trainwright.recorder.program import RecordedStep
from trainwright.runlog.records import Watched
from trainwright.state.spikes import SpikeDetector
from trainwright.watching.schedule import ExaminationSchedule


class PlainNumbers(NamedTuple):
    """What the log needs of a step without anything to tell, whose batch it must not keep. ``ring`` may hold that."""

    number: int
    loss: float
    norm: float
    lr: float
    step_s: float
    wait_s: float
    ended_s: float
    ring: InputRing

    @property
    def are_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def as_read(self) -> Numbers:
        return Numbers.of((self.loss,), self.loss, self.norm)

    def recorded(self) -> RecordedStep:
        """A new record of the step, without sample ids."""
        step = RecordedStep(self.number, lr=self.lr, ended_s=self.ended_s, is_told_late=True)
        step.loss, step.grad_norm = self.loss, self.norm
        step.values = {"step_s": self.step_s, "wait_s": self.wait_s}
        return step

    def as_record(self) -> Watched:
        """For the log. Where the step was run again, it has events, too."""
        ring = self.ring
        if ring.is_made(self.number):
            step = ring.made(self.number)
            ring.name_samples(step)
            return as_record(step, self.as_read)
        sizes = ring.inputs_of(self.number).sizes if ring.holds(self.number) else []
        return Watched(
            time_s=self.ended_s,
            step=self.number,
            loss=self.loss,
            grad_norm=self.norm,
            lr=self.lr,
            events=[],
            values={"losses": [self.loss], "ids": sizes, "step_s": self.step_s, "wait_s": self.wait_s},
        )


class Unjudged(NamedTuple):
    """A step that is over. ``is_new``: its program is another than all before.

    ``read`` returns loss and gradient norm, which are on their way from a GPU; None where ``numbers`` has them.
    """

    numbers: PlainNumbers
    inputs: StepInputs
    spike: SpikeDecision | None = None
    is_new: bool = False
    read: Callable[[], list[float]] | None = None

    def with_numbers(self) -> Unjudged:
        """Waits for what is on its way."""
        if self.read is None:
            return self
        loss, norm = self.read()
        return self._replace(numbers=self.numbers._replace(loss=loss, norm=norm), read=None)

    def recorded(self) -> RecordedStep:
        """A new record of the step."""
        step = self.numbers.recorded()
        if self.spike is not None:
            spike = self.spike.spike
            step.values["spike"] = [spike.grad_norm, spike.usual, spike.initial, self.spike.action]
            if self.spike.action == "rollback":
                step.values["edited"] = True  # the state after it is another
        if self.is_new:
            step.values["changed"] = True
        return step

    def held_by(self, ring: InputRing, blind: str | None) -> RecordedStep:
        """The record that the ring has; it may have had no room for it. ``blind`` says why no step can be run again."""
        number = self.numbers.number
        step = ring.made(number) if ring.holds(number) else self.recorded()
        step.blind = step.blind or blind
        return step


def are_calm(steps: Sequence[Unjudged], schedule: ExaminationSchedule) -> bool:
    """Whether none of them is to be reported or examined, as in nearly all cases: ``schedule`` has passed over them."""
    if not steps or True in [each.is_new or each.spike is not None for each in steps]:
        return False
    losses = [each.numbers.loss for each in steps]
    are_finite = math.isfinite(sum(losses) + sum([each.numbers.norm for each in steps]))
    return are_finite and schedule.pass_over(steps[0].numbers.number, losses)


def warned_of_spikes(steps: list[Unjudged], detector: SpikeDetector) -> list[Unjudged]:
    """The same steps, each with the spike that its gradient norm is."""
    numbers = [each.numbers for each in steps]
    found = detector.detect_all({each.number: each.norm for each in numbers if each.are_finite})
    if not found:
        return steps
    spikes = [found.get(each.numbers.number) for each in steps]
    return [
        each if spike is None else each._replace(spike=SpikeDecision(spike, "warn"))
        for each, spike in zip(steps, spikes)
    ]
