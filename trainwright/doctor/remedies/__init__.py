"""Remedies that a replay tries before they are offered, one function each."""

from __future__ import annotations

from trainwright.doctor.remedies import loss, nonfinite, optim, precision
from trainwright.replay.trials import DEFAULT_STEPS, RegisteredTrial

TRIALS: dict[str, RegisteredTrial] = {
    "finite_mask": RegisteredTrial(nonfinite.finite_mask, 3.0),
    "fp32_weights": RegisteredTrial(precision.fp32_weights, 3.0),
    "guarded": RegisteredTrial(nonfinite.guarded, 3.0),
    "in_fp32": RegisteredTrial(nonfinite.in_fp32, 3.0),
    "loss_scale": RegisteredTrial(precision.loss_scale, 3.0),
    "valid_targets": RegisteredTrial(nonfinite.valid_targets, 3.0),
    "without_these_samples": RegisteredTrial(nonfinite.without_these_samples, 3.0),
    "zero_infinity": RegisteredTrial(nonfinite.zero_infinity, 3.0),
    "another_rate": RegisteredTrial(optim.another_rate, DEFAULT_STEPS),
    "clip_at": RegisteredTrial(optim.clip_at, DEFAULT_STEPS),
    "group_lr": RegisteredTrial(optim.group_lr, DEFAULT_STEPS),
    "logits_instead_of_probabilities": RegisteredTrial(loss.logits_instead_of_probabilities, DEFAULT_STEPS),
    "other_lr": RegisteredTrial(optim.other_lr, DEFAULT_STEPS),
    "weight_decay": RegisteredTrial(optim.weight_decay, 43.0),
    "with_optimizer": RegisteredTrial(optim.with_optimizer, DEFAULT_STEPS),
}
"""By the name in the findings."""
