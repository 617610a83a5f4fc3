"""Which steps are recorded in full where a loop calls its model many times a step."""

from __future__ import annotations

from trainwright.recorder.hooks import CallHooks
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.recording import LoopRecorder

MIN_CALLS = 8
"""Forward calls in a step, with and without gradients, from which on it is recorded in full only now and then ..."""
SMALL_CALL_S = 0.002
"""... where the step takes less for each: then hooks and tape take more than a tenth of it."""
FIRST = 8
"""Until this step all are recorded in full."""
COUNTED = 64
"""Steps whose forward calls are counted. Later only those are that such a loop records in full."""
AFTER_INCIDENT = 64
"""Steps that are recorded in full after one that was not finite: the next of its kind can be replayed."""


class LightSteps:
    """Takes the hooks off the model in most steps of a loop that calls it many times, as in generation or rollouts.

    ``is_off``: never.
    """

    def __init__(self, recording: LoopRecorder, *, is_off: bool) -> None:
        self._recording = recording
        self._hooks: list[CallHooks] = []
        self._is_off, self.is_wanted, self._full_until = is_off, False, FIRST
        self.is_light = False

    def add(self, hooks: CallHooks) -> None:
        self._hooks.append(hooks)

    def had_incident(self, step: int) -> None:
        """``step`` was not finite."""
        self._full_until = step + AFTER_INCIDENT

    def closed(self, step: RecordedStep, step_s: float) -> None:
        """``step`` is over, where a step takes ``step_s``."""
        is_counted = self.is_wanted or step.step <= COUNTED
        if is_counted and not self._is_off and not step.is_light:
            calls = step.kinds.count("forward")
            self.is_wanted = calls >= MIN_CALLS and step_s < SMALL_CALL_S * calls

    def may_be_light(self, step: int) -> bool:
        """Whether the step after ``step`` is light, unless it may be replayed."""
        return self.is_wanted and step >= self._full_until and not self._recording.saw_others

    def prepare_next(self, *, is_light: bool) -> None:
        """Must be called when a step is over. ``is_light``: the next one is."""
        if is_light == self.is_light:
            return
        self.is_light = is_light
        for each in self._hooks:
            each.take_off() if is_light else each.put_on()
        self._recording.set_light(is_light)

    def end(self) -> None:
        """Put the hooks on for good."""
        self._is_off, self.is_wanted = True, False
        self.prepare_next(is_light=False)
