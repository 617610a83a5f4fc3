"""See the function."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import Drift, WeightsFacts
from trainwright.doctor.finding import listed
from trainwright.runlog.records import Where


@check(names_cause=False, stage="update", confidence=0.7, needs=WeightsFacts)
def weights_drift(run: RunContext) -> Iterator[Result]:
    """A weight grows or shrinks steadily by orders of magnitude.

    How it is detected: the root mean square of every weight at each examination, beside that of at least 48 steps, or
    half of the run, earlier: a factor of 30, in one direction, and beyond what a fresh weight of this shape has.

    Exceptions: reported only with -v where the loss has fallen meanwhile.

    Usual cause: growing: a loss without a lower bound, or a learning rate that is far too high; shrinking: weight decay
    that is too strong, or a factor in the loop.

    Fix: look at the gradient of this weight, its learning rate and its weight decay.
    """
    facts = run.latest(WeightsFacts)
    steady = [each for each in facts.drifts if each.steady] if facts is not None else []
    if facts is None or not steady:
        return
    worst, losses = max(steady, key=_factor), [each.loss for each in run.steps]
    has_learned = statistics.median(losses[-8:]) < statistics.median(losses[:8])
    grows = worst.now > worst.before
    yield run.finding(
        facts.steps,
        symptom=f"{worst.name} {'grows' if grows else 'shrinks'} steadily: root mean square {worst.before:.3g} at step "
        f"{worst.since}, {worst.now:.3g} at step {facts.steps}",
        severity="info" if has_learned else "warning",
        where=Where(module=worst.name.rpartition(".")[0]),
        since_step=worst.since,
        evidence=[
            ("root mean square", worst.now, worst.before),
            ("that of a fresh weight of this shape", worst.usual),
            ("tensors that drift", listed([each.name for each in steady]), "none"),
        ],
    )


def _factor(drift: Drift) -> float:
    return abs(math.log(max(drift.now, 1e-30) / max(drift.before, 1e-30)))
