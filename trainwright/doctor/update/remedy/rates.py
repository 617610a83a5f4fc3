"""Trials of remedies for the optimizer: learning rate, weight decay, clipping, warm-up, which parameters it owns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.doctor.update.measure.rates import MAX_STEPS, norm_of, ramp
from trainwright.recorder.program import ClipGradients, OptimizerStep
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course, trial

STEPS = 8


def compared(what: str, was: list[float], now: list[float]) -> str:
    """The losses with a change and as they were, in words that begin with "no better" if they are not lower."""
    better = "" if math.isfinite(now[-1]) and not now[-1] >= was[-1] else "no better "  # also where ``was`` is NaN
    return f"{better}{what}: loss {course(now)} in {len(now)} steps; as it was: {course(was)} in {len(was)} steps"


@trial("other_lr", steps=75.0)
def other_lr(session: ReplaySession, factor: float, recorded: bool = False) -> str:
    """Updates on this batch alone, or the recorded steps, with the learning rate times ``factor``."""
    steps = MAX_STEPS if recorded else STEPS
    was = session.train(steps, repeat=not recorded)
    now = session.train(steps, Intervention(lr=factor), repeat=not recorded)
    return compared(f"with the learning rate x {factor:g}", was, now)


@trial("warm_up", steps=81.0)
def warm_up(session: ReplaySession) -> str:
    """The recorded steps with a linear warm-up in the first half of them."""
    length = len(session.train(MAX_STEPS))
    rounds = max(1, MAX_STEPS // max(1, length))
    was, now = session.train(MAX_STEPS, rounds=rounds), session.train(MAX_STEPS, ramp(length, rounds), rounds=rounds)
    return compared(f"with a warm-up of {length * rounds // 2} steps", was, now)


@trial("weight_decay", steps=43.0)
def weight_decay(session: ReplaySession, to: float) -> str:
    """The recorded steps with another weight decay."""
    intervention = Intervention(group=lambda step, group: {"weight_decay": to} if "weight_decay" in group else {})
    return compared(f"with a weight decay of {to:g}", session.train(MAX_STEPS), session.train(MAX_STEPS, intervention))


@trial("clip_at")
def clip_at(session: ReplaySession, at: float) -> str:
    """Updates on this batch alone, clipped at ``at``; a loop that does not clip gets a clip before its update."""
    with clipped(session, at):
        now = session.train(STEPS, Intervention(clip=at), repeat=True)
    return compared(f"with gradients clipped at {at:g}", session.train(STEPS, repeat=True), now)


@contextmanager
def clipped(session: ReplaySession, at: float) -> Iterator[None]:
    """Inside, the recorded step has a clip."""
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


@trial("divided_loss", steps=3.0)
def divided_loss(session: ReplaySession, by: int) -> str:
    """The gradient of the step with every loss divided."""
    divided, whole = session.run(Intervention(loss_scale=1 / by)), session.run()
    return f"with the loss / {by}: gradients of norm {divided.grad_norm:.4g}; as it was: {whole.grad_norm:.4g}"


@trial("group_lr")
def group_lr(session: ReplaySession, optimizer: int, group: int, lr: float) -> str:
    """Updates on this batch alone with a learning rate for a parameter group that had none."""
    owner = session.optimizers[optimizer]
    first = id(owner.param_groups[group]["params"][0])

    def change(step: int, live: dict[str, Any]) -> dict[str, Any]:
        return {"lr": lr} if live["params"] and id(live["params"][0]) == first else {}

    was, now = session.train(STEPS, repeat=True), session.train(STEPS, Intervention(group=change), repeat=True)
    return compared(f"with a learning rate of {lr:g} for group {group}", was, now)


@trial("with_optimizer")
def with_optimizer(session: ReplaySession, names: list[str]) -> str:
    """Updates on this batch alone while the first optimizer owns these parameters too."""
    parameters = session.parameters
    owner = session.optimizers[0].param_groups[0]
    before = list(owner["params"])
    was = session.train(STEPS, repeat=True)
    owner["params"] = [*before, *(parameters[name] for name in names)]
    try:
        now = session.train(STEPS, repeat=True)
    finally:
        owner["params"] = before
    return compared(f"with {len(names)} more parameters in the optimizer", was, now)


@trial("one_owner", steps=3.0)
def one_owner(session: ReplaySession) -> str:
    """How far the weights move with the first optimizer only."""
    whole = session.recorded_step.program
    steps = [each for each in whole if isinstance(each, OptimizerStep)]
    if len(steps) < 2:
        raise NotTried("the other optimizer is not watched")
    was = session.run(upto="step")
    session.recorded_step.program = [each for each in whole if each not in steps[1:]]
    try:
        now = session.run(upto="step")
    finally:
        session.recorded_step.program = whole
    moved = [norm_of({n: p.after[n] - p.before[n] for n in p.after}, list(p.after)) for p in (now, was)]
    return f"with one optimizer: the update has a norm of {moved[0]:.3g}; as it was: {moved[1]:.3g}"
