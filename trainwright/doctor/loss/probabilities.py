"""The law of losses that take logarithms of probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import EvaluationFacts
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.records import Where

ROUNDED = 0.05
"""What bfloat16 (8 bits) leaves of a sum of some hundred probabilities is within that of 1."""


def probabilities_add_up(case: Case) -> Iterator[Verdict]:
    """What an evaluation gives to nll_loss are logarithms of probabilities, which add up to 1 over the classes."""
    facts = case.newest(EvaluationFacts)
    if facts is None:
        return
    if facts.mass < 0.0:
        yield NotApplicable("no evaluation calls nll_loss")
    elif facts.mass <= ROUNDED:
        yield Holds(f"they add up to 1 within {facts.mass:.2g}")
    else:
        yield finding(
            "law.loss.probabilities_add_up",
            "warning",
            max(1, facts.after),
            symptom=f"what nll_loss is given in an evaluation are no logarithms of probabilities: over the classes of "
            f"a row these differ from 1 by {facts.mass:.3g}",
            cause="log_softmax is over another dimension than that of the classes, or its values are changed after it",
            remedy="log_softmax(outputs, dim=1) over the classes, right before nll_loss; or cross_entropy(outputs)",
            sure=0.85,
            stage="loss",
            where=Where(op="nll_loss", source=facts.mass_line),
            evidence=[("sum of the probabilities of a row, its median distance from 1", facts.mass, 0.0)],
        )
