"""The law of divergences from a normal distribution."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import DivergenceFacts
from trainwright.runlog.records import Where

NEAR = 1e-3
"""Relative: two weights are the same."""


def divergence_is_of_the_sample(case: Case) -> Iterator[Verdict]:
    """A divergence of a normal sample weighs the squares of its mean and of its deviation alike."""
    facts = case.newest(DivergenceFacts)
    if facts is None:
        if (why := case.blind(DivergenceFacts)) is not None:
            yield NotApplicable(why)
        return
    if not facts.is_sum or not facts.power or not facts.of_log > 0:
        yield NotApplicable(f"{facts.term} is no divergence from a normal distribution")
        return
    words = _wrong(facts)
    if words is None:
        yield Holds(f"{facts.term}: {facts.of_mean:.4g} of both squares, {facts.of_log:.4g} of the logarithm")
        return
    symptom, cause = words
    yield finding(
        "law.loss.divergence_is_of_the_sample",
        "warning",
        case.last_step,
        symptom=symptom,
        cause=cause,
        remedy="(mean ** 2 + std ** 2 - 1).sum(1) / 2 - std.log().sum(1), of the std that the sample is drawn with: "
        "exp(log_var / 2) where the model returns the logarithm of the variance",
        sure=0.8,
        stage="loss",
        since_step=1,
        where=Where(op=facts.term),
        evidence=[
            ("weight of half the square of the mean", facts.of_mean),
            (f"weight of half the deviation to the power of {facts.power:g}", facts.of_power, facts.of_mean),
            ("weight of minus the logarithm of the deviation", facts.of_log),
        ],
    )


def _wrong(facts: DivergenceFacts) -> tuple[str, str] | None:
    """Symptom and cause; None where the form is that of a divergence from a normal distribution."""
    if not facts.deviation_learns:
        return (
            f"the deviation of a sample has no gradient, and the divergence {facts.term} has one for it",
            "it was detached where the sample is drawn: it is learned from the divergence alone",
        )
    if facts.power != 2 and facts.of_power > 0:
        return (
            f"the divergence {facts.term} takes the deviation to the power of {facts.power:g} of the sample for its "
            "variance",
            "exp(log_var) stands for exp(log_var / 2), or the other way round",
        )
    if not abs(facts.of_mean - facts.of_power) <= NEAR * abs(facts.of_power):
        return (
            f"the divergence {facts.term} weighs the square of the mean by {facts.of_mean:.4g} and that of the "
            f"deviation by {facts.of_power:.4g}: that from a normal distribution weighs them alike",
            "a part of the formula is multiplied, left out, or made of the other of both",
        )
    return None
