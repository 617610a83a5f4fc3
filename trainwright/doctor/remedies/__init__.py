"""Remedies that a replay tries before they are offered: a function each."""

from __future__ import annotations

from trainwright.doctor.remedies import nonfinite, precision
from trainwright.replay.trials import RegisteredTrial

TRIALS: dict[str, RegisteredTrial] = {
    "everything_in_fp32": RegisteredTrial(precision.everything_in_fp32, 3.0),
    "finite_mask": RegisteredTrial(nonfinite.finite_mask, 3.0),
    "fp32_weights": RegisteredTrial(precision.fp32_weights, 3.0),
    "guarded": RegisteredTrial(nonfinite.guarded, 3.0),
    "in_fp32": RegisteredTrial(nonfinite.in_fp32, 3.0),
    "larger_eps": RegisteredTrial(nonfinite.larger_eps, 3.0),
    "loss_in_fp32": RegisteredTrial(precision.loss_in_fp32, 3.0),
    "loss_scale": RegisteredTrial(precision.loss_scale, 3.0),
    "positions_in_fp32": RegisteredTrial(precision.positions_in_fp32, 3.0),
    "statistics_without_samples": RegisteredTrial(nonfinite.statistics_without_samples, 3.0),
    "valid_targets": RegisteredTrial(nonfinite.valid_targets, 3.0),
    "without_these_samples": RegisteredTrial(nonfinite.without_these_samples, 3.0),
    "zero_infinity": RegisteredTrial(nonfinite.zero_infinity, 3.0),
}
"""By the name that findings give."""
