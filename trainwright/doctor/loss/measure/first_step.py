"""How the loss of the first step is computed, seen while the loop computes it: without a replay."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainwright.doctor.loss.measure.scores import LossCalls, facts_of
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.tape import Tape
from trainwright.runlog.json_values import Facts


class FirstLoss(Probe):
    """Measures what the experiment "loss" measures, in the first recorded step and outside of the model.

    ``are_rivals``: there are several models or optimizers.
    """

    name = "loss"
    rests = frozenset({"on_step", "on_closed"})

    def __init__(self, tape: Tape, parameters: Sequence[Tensor], *, are_rivals: bool) -> None:
        self._tape, self._parameters, self._are_rivals = tape, parameters, are_rivals
        self._found: LossCalls | None = LossCalls()
        self._reached = 0
        self._recorded: RecordedStep | None = None
        tape.listener = self._found.on_function

    def on_step(self, *_: object) -> None:
        if self._found is not None:
            self._reached = max(self._reached, sum(p.grad is not None for p in self._parameters))

    def on_closed(self, step: RecordedStep) -> None:
        if self._found is not None and self._recorded is None:
            self._recorded, self._tape.listener = step, None

    def values(self) -> Facts | None:
        """Once, of the first step. Where none of its losses was seen outside of the model, a replay may show more."""
        found, step = self._found, self._recorded
        if found is None or step is None:
            return None
        self._found = self._recorded = None
        if not found.calls and not found.outer:
            return None
        return facts_of(found, step, self._reached, self._are_rivals) | {"step": step.step}
