"""The effect of an update on its own batch and on the weights; other learning rates, clipping and weight decays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.recorder.program import OptimizerStep
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

MAX_STEPS = 32
"""The most recorded steps that are run again with other hyperparameters."""


@experiment("update", when="checkup", value=3.0)
def update(session: ReplaySession) -> Facts:
    """How far the update moves the weights, and the loss of the step's batch before and after it."""
    with session.live():
        result = session.replayer.run(session.recorded_step, upto="step")
        after = session.replayer.run(session.recorded_step, upto="forward")
    steps = [each for each in session.recorded_step.program if isinstance(each, OptimizerStep)]
    moved = [name for name in result.after if not torch.equal(result.after[name], result.before[name])]
    owned = [name for name, grad in result.grads.items() if grad is not None]
    change = {name: result.after[name] - result.before[name] for name in moved}
    weight, step = norm_of(result.before, owned), norm_of(change, moved)
    return {
        "loss": result.loss,
        "after": after.loss,
        "optimizers": len({each.optimizer for each in steps}),
        "lr": [float(group["lr"]) for each in steps for group in each.groups if "lr" in group],
        "weight_decay": [float(group.get("weight_decay") or 0.0) for each in steps for group in each.groups],
        "decoupled": any(_is_decoupled(optimizer) for optimizer in session.optimizers),
        "grad_norm": norm_of(result.grads, owned),
        "norm_at_clip": result.norm_at_clip,
        "weight_norm": weight,
        "ratio": step / weight if weight else math.nan,
        "input_rms": _rms(session.inputs),
    }


def norm_of(tensors: Mapping[str, Tensor | None], names: list[str]) -> float:
    """The norm of these tensors taken together."""
    chosen = [tensors[name] for name in names]
    return math.sqrt(sum(float(t.detach().to_dense().double().norm()) ** 2 for t in chosen if t is not None))


def _is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether weight decay acts on the weights and not on the gradient."""
    flagged = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    return flagged or any(kind.__name__ == "AdamW" for kind in type(optimizer).__mro__)


def _rms(inputs: list[Tensor]) -> float | None:
    floats = [x for x in inputs if x.is_floating_point() and x.numel()]
    return max((float(x.double().square().mean().sqrt()) for x in floats), default=None)


@experiment("smaller_steps", when="requested", steps=40.0)
def smaller_steps(session: ReplaySession) -> Facts:
    """The losses of eight updates on this batch alone, and the first smaller learning rate at which they fall."""
    as_it_was = session.train(8, repeat=True)
    for factor in (0.1, 0.01, 0.001):
        losses = session.train(8, Intervention(lr=factor), repeat=True)
        if math.isfinite(losses[-1]) and max(losses) <= losses[0] + 1e-3 * abs(losses[0]) and losses[-1] < losses[0]:
            return {"as_it_was": as_it_was, "falls": factor}
    return {"as_it_was": as_it_was, "falls": None}


@experiment("larger_lr", when="requested", steps=22.0)
def larger_lr(session: ReplaySession) -> Facts:
    """The losses of four updates on this batch alone: as it was, and with larger learning rates."""
    return {
        "as_it_was": session.train(4, repeat=True),
        "larger": [[factor, session.train(4, Intervention(lr=factor), repeat=True)] for factor in (1e2, 1e4, 1e6)],
    }


@experiment("along_the_way", when="requested", steps=160.0)
def along_the_way(session: ReplaySession) -> Facts:
    """Runs the recorded steps up to this one again: as they were, with a tenth of the learning rate, with a warm-up.

    Few steps are repeated in rounds. The warm-up takes half of all steps.
    """
    length = len(session.train(MAX_STEPS))
    rounds = max(1, MAX_STEPS // max(1, length))
    as_it_was = session.train(MAX_STEPS, rounds=rounds)
    return {
        "first": session.step - length + 1,
        "length": length,
        "as_it_was": as_it_was,
        "tenth": session.train(MAX_STEPS, Intervention(lr=0.1), rounds=rounds),
        "warm": session.train(MAX_STEPS, ramp(length, rounds), rounds=rounds),
        "warm_steps": length * rounds // 2,
    }


def ramp(length: int, rounds: int) -> Intervention:
    """A linear warm-up over half of ``rounds * length`` steps."""
    steps: list[int] = []

    def warm_up(step: int, group: dict[str, Any]) -> dict[str, Any]:
        if not steps or steps[-1] != step:  # once a step, not for each group
            steps.append(step)
        return {"lr": group["lr"] * min(1.0, len(steps) / max(1, length * rounds // 2))}

    return Intervention(group=warm_up)


@experiment("without_clip", when="requested", steps=22.0)
def without_clip(session: ReplaySession) -> Facts:
    """The losses of eight updates on this batch alone: clipped as it was, and at a norm of 1."""
    return {"as_it_was": session.train(8, repeat=True), "at_one": session.train(8, Intervention(clip=1.0), repeat=True)}


@experiment("decay", when="requested", steps=60.0)
def decay(session: ReplaySession) -> Facts:
    """Compares the update and the recorded steps with those without weight decay."""
    none = Intervention(group=lambda step, group: {"weight_decay": 0.0} if "weight_decay" in group else {})
    as_it_was, without = session.run(upto="step"), session.run(none, upto="step")
    names = [name for name, grad in as_it_was.grads.items() if grad is not None]
    whole = {name: as_it_was.after[name] - as_it_was.before[name] for name in names}
    due = {name: as_it_was.after[name] - without.after[name] for name in names}
    return {
        "share": norm_of(due, names) / max(norm_of(whole, names), 1e-30),
        "as_it_was": session.train(MAX_STEPS),
        "without": session.train(MAX_STEPS, none),
    }
