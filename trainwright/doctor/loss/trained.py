"""Whether a model knew something before the run began, by its first loss."""

from __future__ import annotations

import math

from trainwright.doctor.case import Case
from trainwright.doctor.loss.facts import ComparisonsFacts

KNOWS = 0.8
"""Of the loss at chance: with less the model was trained before."""


def was_trained_before(case: Case) -> bool:
    """Whether the first loss is surely below that of a model that knows nothing."""
    first = next((facts for step, facts in case.every(ComparisonsFacts) if step == 1), None)
    calls = () if first is None else first.calls
    return any(math.isfinite(each.value) and each.value < KNOWS * each.blank for each in calls)
