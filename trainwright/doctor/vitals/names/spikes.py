"""Checks of gradient norms that are far out of line for a step or a few."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, OldCheck, finding
from trainwright.doctor.shared_calls import kinds
from trainwright.runlog.records import Watched

LATELY, FEW = 32, 8
"""Steps before a spike that tell the usual rate, and those of them whose updates have led to it."""
RAISED = 3.0
"""Times the usual rate: more is no schedule that has settled. Times the rate of the step before: more is no ramp."""


def gradient_spike(case: Case) -> Iterator[Finding]:
    """The gradient norm of a step is many times the usual one, and larger than at the start of the run.

    Where training has converged, the usual norm is small; a batch that is hard is then many times as large and does no
    harm. So a norm below that of the first steps is no finding. A spike that was clipped, that the loss has come back
    from, or that comes while the loop itself raises the rate step by step (a range test) or back to what it was (a
    restart), has the severity info.
    """
    spikes = [record for record in case.watched if _is_large(record)]
    if not spikes:
        return
    record = spikes[0]
    norm, usual, _, action = record.values["spike"]
    raised = _is_raised(case, record.step)
    ramp = raised and not _is_beyond(case, record.step)
    harmless = action == "warn" and (ramp or _is_clipped(record, norm) or _went_on_well(case, record.step))
    yield finding(
        "grad.spike",
        "info" if harmless else "warning",
        record.step,
        symptom=f"the gradient norm is {norm:.3g}, {norm / usual:.0f} times the usual one",
        cause="the learning rate has been raised far above that of the steps before"
        if raised
        else f"the batch of step {record.step} is unlike the others, or the weights have come to a steep place",
        remedy="look at the samples of this step. Clip the gradient norm, or leave such updates out: "
        'on_spike="skip" in tw.watch, spikes.policy: skip in a recipe',
        sure=0.6,
        stage="backward",
        since_step=record.step,
        evidence=[
            ("gradient norm before clipping", norm, usual),
            ("steps like this", len(spikes), 0),
            ("what was done", _DONE.get(action, action)),
        ],
    )


_DONE = {"warn": "the update was made", "skip": "the update was left out", "rollback": "the run went back"}


def _is_large(record: Watched) -> bool:
    spike: Sequence[float] = record.values.get("spike") or ()
    return len(spike) == 4 and spike[0] > spike[2]


def _went_on_well(case: Case, step: int) -> bool:
    """The loss soon after it, or by now, is no higher than just before, noise included: the update undid nothing."""
    before = [each.loss for each in case.watched if step - 16 <= each.step < step]
    after = [each.loss for each in case.watched if step < each.step]
    soon = [each.loss for each in case.watched if step < each.step <= step + 8]
    return bool(soon and before) and min(statistics.median(soon), statistics.median(after[-8:])) <= max(before)


def _is_raised(case: Case, step: int) -> bool:
    """Whether the rate of the last updates is far above the usual one of the steps before."""
    rates = [each.lr for each in case.watched if step - LATELY <= each.step <= step]
    return len(rates) > 2 and max(rates[-FEW:]) > RAISED * statistics.median(rates)


def _is_beyond(case: Case, step: int) -> bool:
    """Whether the rate has lately gone up, in one step, to far above any that there was before."""
    rates = [each.lr for each in case.watched if each.step <= step]
    begin = max(1, len(rates) - FEW)
    return any(rates[i] > RAISED * max(rates[:i]) > 0.0 for i in range(begin, len(rates)))


def _is_clipped(record: Watched, norm: float) -> bool:
    return any(clip["at"] < norm for _, clip in kinds(record, "clip"))


NAMES: tuple[OldCheck, ...] = (gradient_spike,)
