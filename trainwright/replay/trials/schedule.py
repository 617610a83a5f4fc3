"""Remedies of schedules: the recorded step with the learning rate that a right schedule would have given."""

from __future__ import annotations

from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial

STEPS = 8


@trial("another_rate")
def another_rate(bench: ReplaySession, lr: float) -> str:
    """What the batch's loss does in a few updates with ``lr``, and with what the schedule gave."""
    if lr <= 0:
        raise NotTried("no other learning rate is known")
    as_it_was = bench.train(STEPS, repeat=True)
    other = bench.train(STEPS, Intervention(group=lambda step, group: {"lr": lr}), repeat=True)
    return (
        f"{STEPS} updates on this batch with a learning rate of {lr:.3g}: loss {other[0]:.4g} -> {other[-1]:.4g}; "
        f"as it was: {as_it_was[0]:.4g} -> {as_it_was[-1]:.4g}"
    )
