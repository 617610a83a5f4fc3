"""What an update does: to its own batch, to the weights, and with another learning rate, clip or weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.observe.program import Step
from trainwright.replay.bench import Bench
from trainwright.replay.experiments import experiment
from trainwright.replay.play import Edit

WAY = 32
"""At most so many recorded steps are run again with another learning rate."""


@experiment("update", when="checkup")
def update(bench: Bench) -> dict[str, Any]:
    """How far the update moves the weights, and the loss of the step's batch before and after it."""
    with bench.live():
        played = bench.player.play(bench.segment, upto="step")
        after = bench.player.play(bench.segment, upto="forward")
    steps = [each for each in bench.segment.program if isinstance(each, Step)]
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


def _rms(inputs: list[Tensor]) -> float | None:
    floats = [x for x in inputs if x.is_floating_point() and x.numel()]
    return max((float(x.double().square().mean().sqrt()) for x in floats), default=None)


@experiment("larger_lr", when="asked")
def larger_lr(bench: Bench) -> dict[str, Any]:
    """The loss of this step's batch in four updates on it alone, with the learning rate and with larger ones."""
    return {
        "as_it_was": bench.train(4, repeat=True),
        "larger": [[factor, bench.train(4, Edit(lr=factor), repeat=True)] for factor in (1e2, 1e4, 1e6)],
    }


@experiment("along_the_way", when="asked")
def along_the_way(bench: Bench) -> dict[str, Any]:
    """The recorded steps up to this one again: as they were, with a tenth of the learning rate, with a warm-up.

    The warm-up takes half of them, so that the other half has the whole learning rate.
    """
    as_it_was = bench.train(WAY)
    first = bench.step - len(as_it_was) + 1
    return {
        "first": first,
        "as_it_was": as_it_was,
        "tenth": bench.train(WAY, Edit(lr=0.1)),
        "warm": bench.train(WAY, ramp(first, len(as_it_was) // 2)),
        "warm_steps": len(as_it_was) // 2,
    }


def ramp(first: int, steps: int) -> Edit:
    """A linear warm-up from ``first`` on."""

    def rising(step: int, group: dict[str, Any]) -> dict[str, Any]:
        return {"lr": group["lr"] * min(1.0, (step - first + 1) / max(1, steps))}

    return Edit(group=rising)


@experiment("without_clip", when="asked")
def without_clip(bench: Bench) -> dict[str, Any]:
    """The loss of this step's batch in eight updates on it alone: clipped as it was, and at a norm of 1."""
    return {"as_it_was": bench.train(8, repeat=True), "at_one": bench.train(8, Edit(clip=1.0), repeat=True)}


@experiment("decay", when="asked")
def decay(bench: Bench) -> dict[str, Any]:
    """The update and the recorded steps again without weight decay."""
    none = Edit(group=lambda step, group: {"weight_decay": 0.0} if "weight_decay" in group else {})
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
