"""Tells probes that a step is over: some of calm steps later, of several at a time, when the code of it is warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from trainwright.recorder.listener import Listener, Methods, call_each, methods_of
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep


class StepClosing(Listener):
    """Calls ``on_closed`` of probes; those of ``closes_late`` wait for ``tell``, which may come after further steps.

    They wait at most until something happens that is no part of a plain step, so that such a probe has all steps before
    it hears of a loss scale, an epoch, an evaluation, ... Must be told of these before the probes are.
    ``interrupted`` is called at these, but for the calls of a scaler and of autograd.grad: they come in every step.
    ``at_once`` are the probes that do not wait.
    """

    def __init__(self, probes: Sequence[Probe], interrupted: Callable[[], None]) -> None:
        self._interrupted = interrupted
        late = methods_of([each for each in probes if each.closes_late], "on_closed", Probe)
        at_once = [each for each in probes if not each.closes_late and type(each).on_closed is not Probe.on_closed]
        self.at_once, self._methods = at_once, methods_of(at_once, "on_closed", Probe)
        self._late: Methods = [
            (each, partial(_of_last if each.hears_last else _of_all, call), rests)  # type: ignore[attr-defined]
            for each, call, rests in late
        ]
        self._steps: list[RecordedStep] = []

    def close(self, step: RecordedStep) -> None:
        """``step`` is over."""
        call_each(self._methods, step)
        self._newest_is_late()
        self._steps.append(step)

    def tell(self) -> None:
        """Tells the probes of the steps that wait, in order: one probe of all, while its code is warm."""
        if self._steps:
            steps, self._steps = self._steps, []
            call_each(self._late, steps)

    def _newest_is_late(self) -> None:
        if self._steps:
            self._steps[-1].is_told_late = True

    def _before(self, *_: object) -> None:
        self._newest_is_late()
        self.tell()

    def _interrupt(self, *_: object) -> None:
        self._before()
        self._interrupted()

    # whatever they are told
    on_scaled = on_unscale = on_scaler_step = on_scaler_update = on_autograd_grad = _before  # type: ignore[assignment]
    on_epoch = on_forward_without_grad = on_mode = on_warning = _interrupt  # type: ignore[assignment]
    on_state_dict = on_loaded = on_saved = on_copied = _interrupt  # type: ignore[assignment]


def _of_last(on_closed: Callable[[RecordedStep], None], steps: Sequence[RecordedStep]) -> None:
    on_closed(steps[-1])


def _of_all(on_closed: Callable[[RecordedStep], None], steps: Sequence[RecordedStep]) -> None:
    for step in steps:
        on_closed(step)
