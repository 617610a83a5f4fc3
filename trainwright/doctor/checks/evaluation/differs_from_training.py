"""See the function."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.function import GapFacts
from trainwright.doctor.finding import ExperimentRequest, in_words
from trainwright.runlog.records import Where

APART = 40
"""Steps after which running statistics have followed the weights: 0.9 to the power of 40 is 1.5 %."""


@check(names_cause=False, stage="buffers", confidence=0.8)
def differs_from_training(run: RunContext) -> Iterator[Result]:
    """With the same weights, the loss of a batch is much higher in eval mode than in train mode.

    How it is detected: a replay of one batch in both modes at two steps that are 40 or more apart: eval mode loses more
    than half of what was learned since the first steps.

    Exceptions: reported only with -v where no module of torch's explains half of the difference.

    Usual cause: running statistics do not follow the activations: momentum, batches that are too small or unlike each
    other; or a module does another thing in eval mode.

    Looks like: model.bn_tiny_batch.

    Fix: look at the named module: its momentum, its statistics, what it does with `self.training`.
    """
    every, losses = run.every(GapFacts), [each.loss for each in run.steps if math.isfinite(each.loss)]
    if len(losses) < 4 or run.last_step < APART:
        return
    if not every or every[-1][0] <= run.last_step - APART:
        yield ExperimentRequest(GapFacts.experiment)
    bad = [(step, facts) for step, facts in every if _lost(facts, max(losses[:4])) > 0.5]
    lasts = bool(bad) and (bad[-1][0] - bad[0][0] >= APART or not math.isfinite(bad[-1][1].eval))
    if not lasts or every[-1] != bad[-1]:
        return
    step, facts = bad[-1]
    is_explained = facts.without is not None and not facts.without - facts.train > 0.5 * (facts.eval - facts.train)
    yield run.finding(
        step,
        symptom=f"the loss of one batch is {facts.train:.4g} in train mode and {facts.eval:.4g} in eval mode",
        severity="warning" if is_explained else "info",
        where=Where(module=facts.module),
        evidence=[(f"loss with {in_words(facts.module)} alone in train mode", facts.without, facts.train)],
    )


def _lost(facts: GapFacts, first: float) -> float:
    """The fraction of the fall of the loss that is lost in eval mode; 0 where none has fallen."""
    fallen = first - facts.train
    return (facts.eval - facts.train) / fallen if fallen > 0.05 * abs(first) else 0.0
