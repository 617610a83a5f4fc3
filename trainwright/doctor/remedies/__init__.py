"""Remedies that a replay tries before they are offered: a function each."""

from __future__ import annotations

from trainwright.doctor.remedies import loss
from trainwright.replay.trials import USUAL_STEPS, RegisteredTrial

TRIALS: dict[str, RegisteredTrial] = {
    "balanced_terms": RegisteredTrial(loss.balanced_terms, USUAL_STEPS),
    "same_shape": RegisteredTrial(loss.same_shape, USUAL_STEPS),
    "scores_for_probabilities": RegisteredTrial(loss.scores_for_probabilities, USUAL_STEPS),
    "second_softmax": RegisteredTrial(loss.second_softmax, 3.0),
    "targets_in_range": RegisteredTrial(loss.targets_in_range, USUAL_STEPS),
    "turned_sign": RegisteredTrial(loss.turned_sign, USUAL_STEPS),
}
"""By the name that findings give."""
