"""What an update does: to its own batch, to the weights, and with another learning rate, clip or weight decay."""

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

WAY = 32
"""At most so many recorded steps are run again with another learning rate."""


@experiment("update", when="checkup")
def update(bench: ReplaySession) -> dict[str, Any]:
    """How far the update moves the weights, and the loss of the step's batch before and after it."""
    with bench.live():
        played = bench.player.play(bench.segment, upto="step")
        after = bench.player.play(bench.segment, upto="forward")
    steps = [each for each in bench.segment.program if isinstance(each, OptimizerStep)]
    moved = [name for name in played.after if not torch.equal(played.after[name], played.before[name])]
    owned = [name for name, grad in played.grads.items() if grad is not None]
    change = {name: played.after[name] - played.before[name] for name in moved}
    weight, step = norm_of(played.before, owned), norm_of(change, moved)
    return {
        "loss": played.loss,
        "after": after.loss,
        "optimizers": len({each.optimizer for each in steps}),
        "lr": [float(group["lr"]) for each in steps for group in each.groups if "lr" in group],
        "weight_decay": [float(group.get("weight_decay") or 0.0) for each in steps for group in each.groups],
        "decoupled": any(_is_decoupled(optimizer) for optimizer in bench.optimizers),
        "grad_norm": norm_of(played.grads, owned),
        "norm_at_clip": played.norm_at_clip,
        "weight_norm": weight,
        "update_norm": step,
        "ratio": step / weight if weight else math.nan,
        "input_rms": _rms(bench.inputs),
    }


def norm_of(tensors: Mapping[str, Tensor | None], names: list[str]) -> float:
    """The norm of all of these together."""
    chosen = [tensors[name] for name in names]
    return math.sqrt(sum(float(t.detach().to_dense().double().norm()) ** 2 for t in chosen if t is not None))


def _is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether weight decay acts on the weights and not on the gradient."""
    flagged = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    return flagged or any(kind.__name__ == "AdamW" for kind in type(optimizer).__mro__)


def _rms(inputs: list[Tensor]) -> float | None:
    floats = [x for x in inputs if x.is_floating_point() and x.numel()]
    return max((float(x.double().square().mean().sqrt()) for x in floats), default=None)


@experiment("smaller_steps", when="asked")
def smaller_steps(bench: ReplaySession) -> dict[str, Any]:
    """The loss of this step's batch in eight updates on it alone, and the first smaller rate at which it falls."""
    as_it_was = bench.train(8, repeat=True)
    for factor in (0.1, 0.01, 0.001):
        losses = bench.train(8, Intervention(lr=factor), repeat=True)
        if math.isfinite(losses[-1]) and max(losses) <= losses[0] + 1e-3 * abs(losses[0]) and losses[-1] < losses[0]:
            return {"as_it_was": as_it_was, "falls": factor, "smaller": losses}
    return {"as_it_was": as_it_was, "falls": None}


@experiment("larger_lr", when="asked")
def larger_lr(bench: ReplaySession) -> dict[str, Any]:
    """The loss of this step's batch in four updates on it alone, with the learning rate and with larger ones."""
    return {
        "as_it_was": bench.train(4, repeat=True),
        "larger": [[factor, bench.train(4, Intervention(lr=factor), repeat=True)] for factor in (1e2, 1e4, 1e6)],
    }


@experiment("along_the_way", when="asked")
def along_the_way(bench: ReplaySession) -> dict[str, Any]:
    """The recorded steps up to this one again: as they were, with a tenth of the learning rate, with a warm-up.

    A few steps are gone through twice. The warm-up takes half of the way, so that the other half has the whole rate.
    """
    length = len(bench.train(WAY))
    rounds = max(1, WAY // max(1, length))
    as_it_was = bench.train(WAY, rounds=rounds)
    return {
        "first": bench.step - length + 1,
        "length": length,
        "as_it_was": as_it_was,
        "tenth": bench.train(WAY, Intervention(lr=0.1), rounds=rounds),
        "warm": bench.train(WAY, ramp(length, rounds), rounds=rounds),
        "warm_steps": length * rounds // 2,
    }


def ramp(length: int, rounds: int) -> Intervention:
    """A linear warm-up over half of ``rounds`` times ``length`` steps."""
    seen: list[int] = []

    def rising(step: int, group: dict[str, Any]) -> dict[str, Any]:
        if not seen or seen[-1] != step:  # once a step, not for each group
            seen.append(step)
        return {"lr": group["lr"] * min(1.0, len(seen) / max(1, length * rounds // 2))}

    return Intervention(group=rising)


@experiment("without_clip", when="asked")
def without_clip(bench: ReplaySession) -> dict[str, Any]:
    """The loss of this step's batch in eight updates on it alone: clipped as it was, and at a norm of 1."""
    return {"as_it_was": bench.train(8, repeat=True), "at_one": bench.train(8, Intervention(clip=1.0), repeat=True)}


@experiment("decay", when="asked")
def decay(bench: ReplaySession) -> dict[str, Any]:
    """The update and the recorded steps again without weight decay."""
    none = Intervention(group=lambda step, group: {"weight_decay": 0.0} if "weight_decay" in group else {})
    as_it_was, without = bench.run(upto="step"), bench.run(none, upto="step")
    names = [name for name, grad in as_it_was.grads.items() if grad is not None]
    whole = {name: as_it_was.after[name] - as_it_was.before[name] for name in names}
    due = {name: as_it_was.after[name] - without.after[name] for name in names}
    return {
        "share": norm_of(due, names) / max(norm_of(whole, names), 1e-30),
        "shrinks": norm_of(due, names) / max(norm_of(as_it_was.before, names), 1e-30),
        "as_it_was": bench.train(WAY),
        "without": bench.train(WAY, none),
    }
