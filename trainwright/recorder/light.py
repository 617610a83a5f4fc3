"""Decides which steps of a loop are light: of these only losses and updates are recorded.

Only a loop that calls its model many times per step has light steps.
"""

from __future__ import annotations

from trainwright.recorder.hooks import CallHooks
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.recording import LoopRecorder

MIN_CALLS = 8
"""Minimum number of forward calls per step, with and without gradients, of a loop with light steps."""
SMALL_CALL_S = 0.002
"""Maximum step time per forward call of such a loop. Hooks and tape take more than a tenth of so short a call."""
FIRST = 8
"""All steps until this one are recorded in full."""
COUNTED = 64
"""Forward calls are counted in all steps until this one. Later they are counted only while the loop has light steps."""
AFTER_INCIDENT = 64
"""Number of steps recorded in full after a non-finite one, so that another non-finite step can be replayed."""


class LightSteps:
    """Removes the hooks from the model in most steps of a loop that calls it often, as in generation or rollouts.

    ``is_off``: never removes them.
    """

    def __init__(self, recording: LoopRecorder, *, is_off: bool) -> None:
        self._recording = recording
        self._hooks: list[CallHooks] = []
        self._is_off, self.is_wanted, self._full_until = is_off, False, FIRST
        self.is_light = False

    def add(self, hooks: CallHooks) -> None:
        self._hooks.append(hooks)

    def had_incident(self, step: int) -> None:
        """Records that ``step`` was not finite."""
        self._full_until = step + AFTER_INCIDENT

    def closed(self, step: RecordedStep, step_s: float) -> None:
        """Called at the end of ``step``. A step takes ``step_s`` seconds."""
        is_counted = self.is_wanted or step.step <= COUNTED
        if is_counted and not self._is_off and not step.is_light:
            calls = step.kinds.count("forward")
            self.is_wanted = calls >= MIN_CALLS and step_s < SMALL_CALL_S * calls

    def may_be_light(self, step: int) -> bool:
        """Returns True if the step after ``step`` can be light."""
        return self.is_wanted and step >= self._full_until and not self._recording.saw_others

    def prepare_next(self, *, is_light: bool) -> None:
        """Must be called at the end of a step. ``is_light``: the next step is light."""
        if is_light == self.is_light:
            return
        self.is_light = is_light
        for each in self._hooks:
            each.take_off() if is_light else each.put_on()
        self._recording.set_light(is_light)

    def end(self) -> None:
        """Adds the hooks again. No later step is light."""
        self._is_off, self.is_wanted = True, False
        self.prepare_next(is_light=False)
