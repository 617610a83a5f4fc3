"""Trials of remedies for schedules: the recorded step with the learning rate of a correct schedule."""

from __future__ import annotations

from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course, trial

STEPS = 8


@trial("another_rate")
def another_rate(session: ReplaySession, lr: float) -> str:
    """The loss over updates on this batch with the learning rate ``lr``, and with that of the schedule."""
    if lr <= 0:
        raise NotTried("no other learning rate is known")
    as_it_was = session.train(STEPS, repeat=True)
    other = session.train(STEPS, Intervention(group=lambda step, group: {"lr": lr}), repeat=True)
    return (
        f"{STEPS} updates on this batch with a learning rate of {lr:.3g}: loss {course(other)}; "
        f"as it was: {course(as_it_was)}"
    )
