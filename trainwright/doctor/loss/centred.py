"""The law of where targets lie: near what outputs begin with, or so that it is soon learned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import ComparedFacts, ComparisonsFacts
from trainwright.doctor.loss.laws import NAMES, named, where_of

FAR = 3.0
"""Standard deviations of the targets from 0 to their mean."""
SIZE = 1.0
"""The loss of outputs of 0 on targets of size 1: outputs of a usual initialisation are as large, and reach these."""
NEAR = 2.0
"""Times the loss of the best constant prediction: with more it is not learned yet."""
BEGIN = 8
"""The last step at which a model knows nothing yet."""
SHARE, LEAST = 0.1, 40
"""Of a run's steps: what may go into learning a constant; steps of a run that this can be said of."""
DIGITS = 2.0**23
"""The size at which float32 numbers are whole ones."""
SQUARES, LINEAR = frozenset({"mse_loss", *NAMES}), frozenset({"l1_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that grow with the square of a distance, and in proportion to one that is large."""


def targets_are_centred(case: Case) -> Iterator[Verdict]:
    """What all targets have in common is learned within a tenth of the run."""
    every = case.every(ComparisonsFacts)
    if not every:
        return
    begin, first = every[0]
    values = [n for n, each in enumerate(first.calls) if _is_of_values(each)]
    if begin > BEGIN or not values:
        yield NotApplicable("no values are predicted" if not values else "the loss was not seen at the begin")
        return
    if lost := [n for n in values if _is_lost(first.calls[n])]:
        yield _beyond_digits(case, first.calls[lost[0]])
        return
    far = [n for n in values if _is_far(first.calls[n])]
    if not far:
        yield Holds(", ".join(f"{named(first.calls[n])}: {_offset(first.calls[n]):.2g} deviations" for n in values))
        return
    place = max(far, key=lambda n: _offset(first.calls[n]))
    rows = [(step, facts.calls[place]) for step, facts in every if len(facts.calls) > place]
    away = [step for step, call in rows if call.value > NEAR * call.constant]
    if rows[-1][0] == away[-1] < case.last_step:
        yield ExperimentRequest(ComparisonsFacts.experiment)
    if not case.finished or case.last_step < LEAST:
        yield NotApplicable("the end of the run tells how long it took to learn where the targets lie")
    elif away[-1] <= SHARE * case.last_step:
        yield Holds(f"where the targets lie was learned by step {away[-1]} of {case.last_step}")
    else:
        yield _too_far(case, first.calls[place], away[-1])


def _is_of_values(call: ComparedFacts) -> bool:
    return call.op in SQUARES | LINEAR and call.constant > 0 and not call.made


def _is_far(call: ComparedFacts) -> bool:
    """Whether both the outputs and 0 are far from the targets, whose mean is not."""
    times = FAR**2 + 1 if call.op in SQUARES else FAR
    return math.isfinite(call.value) and call.blank > SIZE and min(call.value, call.blank) > times * call.constant


def _is_lost(call: ComparedFacts) -> bool:
    """Whether targets are so large that a float32 number beside them has no digit left for outputs of size 1."""
    size = min(call.value, call.blank) / max(1, call.targets)  # of a mean it is smaller than it need be
    return math.isfinite(size) and size > (DIGITS**2 if call.op in SQUARES else DIGITS)


def _offset(call: ComparedFacts) -> float:
    """About how many of their deviations the targets lie from 0."""
    times = call.blank / call.constant
    return math.sqrt(max(0.0, times - 1)) if call.op in SQUARES else times


def _too_far(case: Case, call: ComparedFacts, until: int) -> Verdict:
    return finding(
        "law.loss.targets_are_centred",
        "warning",
        case.last_step,
        symptom=f"the targets of {named(call)} lie {_offset(call):.2g} of their deviations from 0, and after {until} "
        f"of {case.last_step} steps the loss was more than {NEAR:g} times that of their mean",
        cause="the targets are not standardised, or with a wrong offset or scale: much of the run goes into a constant",
        remedy="subtract the mean of the training targets and divide by their deviation, or begin with their mean as "
        "the bias of the last layer",
        sure=0.75,
        stage="label",
        since_step=1,
        where=where_of(call),
        evidence=[
            ("first loss", round(call.value, 6)),
            ("of outputs of 0", round(call.blank, 6)),
            ("of the best constant", round(call.constant, 6)),
            ("steps until the loss was near that", until, f"<= {SHARE * case.last_step:.0f}"),
        ],
    )


def _beyond_digits(case: Case, call: ComparedFacts) -> Verdict:
    return finding(
        "law.loss.targets_are_centred",
        "warning",
        max(1, case.last_step),
        symptom=f"{named(call)} of outputs of 0 is {call.blank:.3g}: beside such targets a change of an output by 1 is "
        "lost in rounding",
        cause="targets are in units that are far too small, or were multiplied again and again: a discount above 1, a "
        "sum that never begins anew",
        remedy="print the largest target of a batch; standardise targets",
        sure=0.85,
        stage="label",
        since_step=1,
        where=where_of(call),
        evidence=[("loss of outputs of 0", call.blank), ("targets", call.targets)],
    )
