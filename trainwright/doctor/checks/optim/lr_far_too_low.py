"""See the function."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import OtherRatesFacts, WeightsFacts
from trainwright.doctor.finding import ExperimentRequest, RemedyTrial

LARGE, NEGLIGIBLE = 0.2, 0.001
"""Fractions of the loss: what a useful rate removes in 8 updates on one batch, and next to nothing."""


@check(stage="update", confidence=0.85, needs=WeightsFacts)
def lr_far_too_low(run: RunContext) -> Iterator[Result]:
    """The learning rate is too low by orders of magnitude.

    How it is detected: the loss has fallen by less than 10 % in 40 updates (24 at the end of a run), and a replay of 8
    updates on one batch takes next to nothing off its loss, but more than a fifth at 100 or more times the rate.

    Exceptions: several optimizers, as in a GAN; a warm-up; the end of a schedule.

    Usual cause: the learning rate itself, or a factor on the loss, the gradients or the update.

    Looks like: optim.weights_never_move, schedule.learning_rate_zero.

    Fix: raise the learning rate to the one that is named; look for factors between the loss and the update.
    """
    steps, weights = [each for each in run.steps if math.isfinite(each.loss)], run.latest(WeightsFacts)
    if weights is None or weights.updates < (24 if run.finished else 40) or not steps:
        return
    rates = [each.lr for each in run.steps]
    if len({each["optimizer"] for kind, each in run.steps[-1].events if kind == "step"}) != 1:
        yield NotApplicable("several optimizers, between which no loss has to fall")
        return
    if rates[-1] > 1.01 * rates[0] or rates[-1] < 0.3 * max(rates):
        yield NotApplicable("the learning rate rises, or is at the end of its schedule")
        return
    first, now = sum(each.loss for each in steps[:4]) / 4, sum(each.loss for each in steps[-8:]) / 8
    if first - now > 0.1 * abs(first):
        yield Passed(f"the loss fell from {first:.4g} to {now:.4g}")
        return
    facts = run.latest(OtherRatesFacts)
    if facts is None:
        if not run.was_tried(OtherRatesFacts):
            yield ExperimentRequest(OtherRatesFacts.experiment)
        return
    was = facts.losses[0]
    better = [(factor, each) for factor, each in zip(facts.factors, facts.losses) if _fall(each) > LARGE]
    if _fall(was) > NEGLIGIBLE or not better or better[0][0] < 100.0:
        yield Passed(f"{len(was)} updates on one batch: loss {was[0]:.4g} -> {was[-1]:.4g}")
        return
    factor, losses = better[0]
    yield run.finding(
        run.last_step,
        symptom=f"{len(was)} updates on one batch take its loss from {was[0]:.4g} to {was[-1]:.4g}; at {factor:g} "
        f"times the learning rate, to {losses[-1]:.4g}",
        cause=f"the learning rate of {facts.lr:g}, or what scales loss or gradients, is off by orders of magnitude",
        remedy=f"a learning rate near {facts.lr * factor / 10:g}; look at factors between the loss and the update",
        since_step=1,
        evidence=[("fraction of the loss that these updates remove", _fall(was), f"{_fall(losses):.3g}")],
        trial=RemedyTrial("other_lr", {"factor": factor}),
    )


def _fall(losses: Sequence[float]) -> float:
    """The fraction of the loss that is gone at the end; 0 where it is not finite, or has risen meanwhile."""
    if not all(map(math.isfinite, losses)) or not losses[0] or max(losses) > losses[0] + 0.1 * abs(losses[0]):
        return 0.0
    return (losses[0] - losses[-1]) / abs(losses[0])
