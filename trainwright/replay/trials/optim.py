"""Remedies of the optimizer: another learning rate, decay, clip or warm-up, and an owner for every weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.recorder.program import ClipGradients, OptimizerStep
from trainwright.replay.experiments.optim import WAY, norm_of, ramp
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial

STEPS = 8


def compared(what: str, was: list[float], now: list[float]) -> str:
    """The two ways a loss went, and which was better."""
    better = math.isfinite(now[-1]) and not now[-1] >= was[-1]
    return f"{'' if better else 'no better '}{what}: loss {_way(now)}; as it was: {_way(was)}"


def _way(losses: list[float]) -> str:
    return f"{losses[0]:.4g} -> {losses[-1]:.4g} in {len(losses)} steps"


@trial("other_lr")
def other_lr(bench: ReplaySession, factor: float, recorded: bool = False) -> str:
    """The step's batch again and again, or the recorded steps, at the learning rate times ``factor``."""
    steps = WAY if recorded else STEPS
    was = bench.train(steps, repeat=not recorded)
    now = bench.train(steps, Intervention(lr=factor), repeat=not recorded)
    return compared(f"with the learning rate x {factor:g}", was, now)


@trial("warm_up")
def warm_up(bench: ReplaySession) -> str:
    """The recorded steps with a learning rate that rises in the first half of them."""
    length = len(bench.train(WAY))
    rounds = max(1, WAY // max(1, length))
    was, now = bench.train(WAY, rounds=rounds), bench.train(WAY, ramp(length, rounds), rounds=rounds)
    return compared(f"with a warm-up of {length * rounds // 2} steps", was, now)


@trial("weight_decay")
def weight_decay(bench: ReplaySession, to: float) -> str:
    """The recorded steps with another weight decay."""
    edit = Intervention(group=lambda step, group: {"weight_decay": to} if "weight_decay" in group else {})
    return compared(f"with a weight decay of {to:g}", bench.train(WAY), bench.train(WAY, edit))


@trial("clip_at")
def clip_at(bench: ReplaySession, at: float) -> str:
    """The step's batch again and again, clipped at ``at``; a loop that does not clip gets a clip before its step."""
    with clipped(bench, at):
        now = bench.train(STEPS, Intervention(clip=at), repeat=True)
    return compared(f"with gradients clipped at {at:g}", bench.train(STEPS, repeat=True), now)


@contextmanager
def clipped(bench: ReplaySession, at: float) -> Iterator[None]:
    """The recorded step has a clip."""
    program = bench.segment.program
    if not any(isinstance(each, ClipGradients) for each in program):
        place = next((i for i, each in enumerate(program) if isinstance(each, OptimizerStep)), None)
        if place is None:
            raise NotTried("the step has no update")
        every = list(range(len(bench.player.subject.parameters)))
        bench.segment.program = [*program[:place], ClipGradients("norm", at, every), *program[place:]]
    try:
        yield
    finally:
        bench.segment.program = program


@trial("divided_loss")
def divided_loss(bench: ReplaySession, by: int) -> str:
    """The step's gradient with every loss divided."""
    divided, whole = bench.run(Intervention(loss_scale=1 / by)), bench.run()
    return f"with the loss / {by}: gradients of norm {divided.grad_norm:.4g}; as it was: {whole.grad_norm:.4g}"


@trial("group_lr")
def group_lr(bench: ReplaySession, optimizer: int, group: int, lr: float) -> str:
    """The step's batch again and again with a learning rate for a group that had none."""
    owner = bench.optimizers[optimizer]
    number = id(owner.param_groups[group]["params"][0])

    def given(step: int, live: dict[str, Any]) -> dict[str, Any]:
        return {"lr": lr} if live["params"] and id(live["params"][0]) == number else {}

    was, now = bench.train(STEPS, repeat=True), bench.train(STEPS, Intervention(group=given), repeat=True)
    return compared(f"with a learning rate of {lr:g} for group {group}", was, now)


@trial("with_optimizer")
def with_optimizer(bench: ReplaySession, names: list[str]) -> str:
    """The step's batch again and again while an optimizer owns these parameters too."""
    named = dict(zip(bench.player.names, bench.player.subject.parameters))
    owner = bench.optimizers[0].param_groups[0]
    held = list(owner["params"])
    was = bench.train(STEPS, repeat=True)
    owner["params"] = [*held, *(named[name] for name in names)]
    try:
        now = bench.train(STEPS, repeat=True)
    finally:
        owner["params"] = held
    return compared(f"with {len(names)} more parameters in the optimizer", was, now)


@trial("one_owner")
def one_owner(bench: ReplaySession) -> str:
    """The step with its first optimizer only: how far the weights move."""
    whole = bench.segment.program
    steps = [each for each in whole if isinstance(each, OptimizerStep)]
    if len(steps) < 2:
        raise NotTried("the other optimizer was not given to the watch")
    was = bench.run(upto="step")
    bench.segment.program = [each for each in whole if each not in steps[1:]]
    try:
        now = bench.run(upto="step")
    finally:
        bench.segment.program = whole
    moved = [norm_of({n: p.after[n] - p.before[n] for n in p.after}, list(p.after)) for p in (now, was)]
    return f"with one optimizer: the update has a norm of {moved[0]:.3g}; as it was: {moved[1]:.3g}"
