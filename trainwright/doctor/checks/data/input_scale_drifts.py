"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Compared, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.data import BatchFacts, InputSpread

FACTOR = 100.0
"""By which the scale of the inputs may change: a switch of data within a task is less."""


@check(stage="input", confidence=0.8, needs=BatchFacts)
def input_scale_drifts(run: RunContext) -> Iterator[Result]:
    """The scale of the inputs changes by orders of magnitude during the run.

    How it is detected: the root mean square of the first input, at the first examined step and at the last: more than
    a factor of 100 apart.

    Usual cause: the data is changed in place in each epoch (`x *= ...`, `.mul_`, `.sub_` on a sample that the data set
    keeps), or a state of the preprocessing runs away.

    Looks like: data.unnormalised_input, which is there from the first step.

    Fix: `x = x * scale` instead of `x *= scale`, or clone the sample first.
    """
    scales = [(step, scale) for step, facts in run.every(BatchFacts) if (scale := _scale(facts.inputs[:1]))]
    if len(scales) < 2:
        return
    (begin, first), (step, last) = scales[0], scales[-1]
    if 1 / FACTOR < last / first < FACTOR:
        yield Compared(f"root mean square {first:.3g} at step {begin}, {last:.3g} at step {step}")
        return
    yield run.finding(
        step,
        symptom=f"the inputs {'grow' if last > first else 'shrink'}: root mean square {first:.3g} at step {begin}, "
        f"{last:.3g} at step {step}",
        evidence=[("root mean square of the inputs", last, first)],
    )


def _scale(inputs: tuple[InputSpread, ...]) -> float:
    return next(((each.mean**2 + each.std**2) ** 0.5 for each in inputs if each.std and each.mean is not None), 0.0)
