"""Remedies that a replay tries before they are offered: a function each."""

from __future__ import annotations

from trainwright.doctor.remedies import data
from trainwright.replay.trials import USUAL_STEPS, RegisteredTrial

TRIALS: dict[str, RegisteredTrial] = {
    "causal_mask": RegisteredTrial(data.causal_mask, 3.0),
    "ignore_padding": RegisteredTrial(data.ignore_padding, USUAL_STEPS),
    "standardized_inputs": RegisteredTrial(data.standardized_inputs, USUAL_STEPS),
    "without_column": RegisteredTrial(data.without_column, USUAL_STEPS),
}
"""By the name that findings give."""
