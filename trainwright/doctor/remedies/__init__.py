"""Remedies that a replay tries before they are offered: a function each."""

from __future__ import annotations

from trainwright.doctor.remedies import optim
from trainwright.replay.trials import USUAL_STEPS, RegisteredTrial

TRIALS: dict[str, RegisteredTrial] = {
    "another_rate": RegisteredTrial(optim.another_rate, USUAL_STEPS),
    "clip_at": RegisteredTrial(optim.clip_at, USUAL_STEPS),
    "group_lr": RegisteredTrial(optim.group_lr, USUAL_STEPS),
    "other_lr": RegisteredTrial(optim.other_lr, USUAL_STEPS),
    "weight_decay": RegisteredTrial(optim.weight_decay, 43.0),
    "with_optimizer": RegisteredTrial(optim.with_optimizer, USUAL_STEPS),
}
"""By the name that findings give."""
