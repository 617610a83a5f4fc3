"""Remedies for the optimizer: learning rate, weight decay, clipping, and its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.recorder.program import ClipGradients, OptimizerStep
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course

NUM_UPDATES = 8  # Number of updates on one batch
MAX_STEPS = 32  # Maximum number of recorded steps that are replayed


def compare_losses(what: str, was: list[float], now: list[float]) -> str:
    """Returns text on the losses, unchanged and with a change; "no better" if they are not lower."""
    better = "" if math.isfinite(now[-1]) and not now[-1] >= was[-1] else "no better "  # also if ``was`` is NaN
    return f"{better}{what}: loss {course(now)} in {len(now)} steps; unchanged: {course(was)} in {len(was)} steps"


def other_lr(session: ReplaySession, factor: float) -> str:
    """Tries updates on this batch with the learning rate times ``factor``."""
    was, now = session.train(NUM_UPDATES, repeat=True), session.train(NUM_UPDATES, Intervention(lr=factor), repeat=True)
    return compare_losses(f"with the learning rate x {factor:g}", was, now)


def another_rate(session: ReplaySession, lr: float) -> str:
    """Tries updates on this batch with the learning rate ``lr``."""
    if lr <= 0:
        raise NotTried("no other learning rate is known")
    changed = Intervention(group=lambda step, group: {"lr": lr})
    was, now = session.train(NUM_UPDATES, repeat=True), session.train(NUM_UPDATES, changed, repeat=True)
    return compare_losses(f"with a learning rate of {lr:.3g}", was, now)


def weight_decay(session: ReplaySession, to: float) -> str:
    """Tries the recorded steps with another weight decay."""
    changed = Intervention(group=lambda step, group: {"weight_decay": to} if "weight_decay" in group else {})
    return compare_losses(f"with a weight decay of {to:g}", session.train(MAX_STEPS), session.train(MAX_STEPS, changed))


def clip_at(session: ReplaySession, at: float) -> str:
    """Tries updates on this batch, clipped at ``at``. A loop without clipping gets a clip before its update."""
    with _clipped(session, at):
        now = session.train(NUM_UPDATES, Intervention(clip=at), repeat=True)
    return compare_losses(f"with gradients clipped at {at:g}", session.train(NUM_UPDATES, repeat=True), now)


@contextmanager
def _clipped(session: ReplaySession, at: float) -> Iterator[None]:
    program = session.recorded_step.program
    if not any(isinstance(each, ClipGradients) for each in program):
        place = next((i for i, each in enumerate(program) if isinstance(each, OptimizerStep)), None)
        if place is None:
            raise NotTried("the step has no update")
        every = list(range(len(session.replayer.subject.parameters)))
        session.recorded_step.program = [*program[:place], ClipGradients("norm", at, every), *program[place:]]
    try:
        yield
    finally:
        session.recorded_step.program = program


def group_lr(session: ReplaySession, optimizer: int, group: int, lr: float) -> str:
    """Tries updates on this batch with a learning rate for a parameter group that had none."""
    first = id(session.optimizers[optimizer].param_groups[group]["params"][0])

    def change(step: int, live: dict[str, Any]) -> dict[str, Any]:
        return {"lr": lr} if live["params"] and id(live["params"][0]) == first else {}

    was, now = (
        session.train(NUM_UPDATES, repeat=True),
        session.train(NUM_UPDATES, Intervention(group=change), repeat=True),
    )
    return compare_losses(f"with a learning rate of {lr:g} for group {group}", was, now)


def with_optimizer(session: ReplaySession, names: list[str]) -> str:
    """Tries updates on this batch with these parameters in the first optimizer."""
    owner = session.optimizers[0].param_groups[0]
    before = list(owner["params"])
    was = session.train(NUM_UPDATES, repeat=True)
    owner["params"] = [*before, *(session.parameters[name] for name in names)]
    try:
        now = session.train(NUM_UPDATES, repeat=True)
    finally:
        owner["params"] = before
    return compare_losses(f"with {len(names)} more parameters in the optimizer", was, now)
