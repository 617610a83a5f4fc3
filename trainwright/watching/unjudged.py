"""Steps of our own engine that are over: before they are judged, and what the log keeps of most of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainwright.engine.spikes import SpikeDecision
from trainwright.engine.step import StepResult
from trainwright.recorder.inputs import InputRing, StepInputs
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.program import RecordedStep


class Unjudged(NamedTuple):
    """A step that is over. ``read`` returns its loss and gradient norm, which are on their way from a GPU.

    ``is_new``: its program is another than all before.
    """

    result: StepResult
    inputs: StepInputs
    ended_s: float
    read: Callable[[], list[float]] | None = None
    is_new: bool = False

    def loss_and_norm(self) -> Sequence[float]:
        return self.read() if self.read else (self.result.loss.item(), self.result.grad_norm.item())

    def recorded(self, blind: str | None) -> RecordedStep:
        """The record of the step. ``blind`` says why no step of this run can be run again."""
        result = self.result
        step = RecordedStep(result.step, lr=result.lr, ended_s=self.ended_s, blind=blind, is_told_late=True)
        step.loss, step.grad_norm, step.losses = result.loss, result.grad_norm, [result.loss]
        step.values = {"step_s": result.step_s, "wait_s": result.wait_s}
        if result.spike is not None:
            note_spike(step, result.spike)
        if self.is_new:
            step.values["changed"] = True
        return step

    def held_by(self, ring: InputRing, blind: str | None) -> RecordedStep:
        """The record that the ring has; it may have had no room for it."""
        number = self.result.step
        return ring.made(number) if ring.holds(number) else self.recorded(blind)


class PlainNumbers(NamedTuple):
    """What the log needs of a step without anything to tell, whose batch it must not keep."""

    number: int
    loss: float
    norm: float
    lr: float
    step_s: float
    wait_s: float
    ended_s: float

    def recorded(self, ring: InputRing) -> tuple[RecordedStep, Numbers]:
        """The record of the step, where the ring still has it that one."""
        numbers = Numbers.of((self.loss,), self.loss, self.norm)
        if ring.holds(self.number):
            return ring.made(self.number), numbers
        step = RecordedStep(self.number, lr=self.lr, ended_s=self.ended_s, is_told_late=True)
        step.loss, step.grad_norm = self.loss, self.norm
        step.values = {"step_s": self.step_s, "wait_s": self.wait_s}
        return step, numbers


def note_spike(step: RecordedStep, decision: SpikeDecision) -> None:
    spike = decision.spike
    step.values["spike"] = [spike.grad_norm, spike.usual, spike.initial, decision.action]
    if decision.action == "rollback":
        step.values["edited"] = True  # the state after it is another
