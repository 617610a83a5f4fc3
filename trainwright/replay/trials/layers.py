"""Trials of remedies for what layers do: activations, BatchNorm, dropout, attention, routers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.replay.experiments.layers import DROPOUTS
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import trial
from trainwright.replay.trials.model import compared, named, once, redrawn, with_ops


@trial("revived")
def revived(bench: ReplaySession, *, module: str) -> str:
    """Biases that outweigh their weights are set to 0; without such, the ReLU becomes leaky."""
    layers = [
        m
        for m in bench.modules.values()
        if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and m.bias is not None
    ]

    def outweighed(layer: Any) -> Tensor:
        return layer.bias.detach() < -4 * layer.weight.detach().flatten(1).norm(dim=1)  # type: ignore[no-any-return]

    def change() -> None:
        for layer in layers:
            layer.bias.data[outweighed(layer)] = 0.0  # type: ignore[union-attr]

    if any(bool(outweighed(layer).any()) for layer in layers):
        return "bias 0: " + compared(bench, Intervention(model=once(change)))

    def leaky(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        return F.leaky_relu(args[0], 0.01) if name in ("relu", "relu_") else function(*args, **kwargs)

    return "LeakyReLU: " + with_ops(bench, leaky)


@trial("relu_for_sigmoid")
def relu_for_sigmoid(bench: ReplaySession) -> str:
    """ReLU for every sigmoid and tanh, with weights drawn for it."""
    matrices = [m.weight for m in bench.modules.values() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]

    def ops(function: Any, args: Any, kwargs: Any) -> Any:
        if getattr(function, "__name__", "") in ("sigmoid", "tanh", "hardsigmoid", "softsign"):
            return args[0].relu()
        return function(*args, **kwargs)

    def draw() -> None:
        for weight in matrices:
            redrawn(weight)
        matrices[-1].data.mul_(0.1)

    was = _slope(bench, Intervention(), matrices)
    now = _slope(bench, Intervention(ops=ops, model=once(draw)), matrices)
    better = "" if now > 100 * was else "no better: "
    told = compared(bench, Intervention(ops=ops, model=once(draw)))
    return f"{better}the first layer's gradient is {now:.1e} of the largest, as it was {was:.1e}; {told}"


def _slope(bench: ReplaySession, edit: Intervention, matrices: Sequence[Tensor]) -> float:
    names = {id(p): name for name, p in named(bench).items()}
    grads = bench.run(edit).grads
    sizes = [float(g.norm()) for w in matrices if (g := grads.get(names.get(id(w), ""))) is not None]
    return sizes[0] / max(*sizes, 1e-300) if sizes else 0.0


@trial("group_norm")
def group_norm(bench: ReplaySession) -> str:
    """GroupNorm in the place of BatchNorm."""

    def change(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        if name != "batch_norm":
            return function(*args, **kwargs)
        channels = args[0].shape[1]
        groups = max(n for n in (1, 2, 4) if channels % n == 0)
        given = inspect.signature(F.batch_norm).bind(*args, **kwargs).arguments
        return F.group_norm(args[0], groups, given.get("weight"), given.get("bias"))

    return with_ops(bench, change)


@trial("momentum_root")
def momentum_root(bench: ReplaySession, *, modules: Sequence[str]) -> str:
    """The momentum of these BatchNorms is such that two updates move the statistics as one did."""
    chosen = [bench.modules[path] for path in modules]
    moved = []
    for root in (False, True):
        with bench.live():
            before = [m.running_mean.clone() for m in chosen]  # type: ignore[operator]
            for m in chosen if root else ():
                m.momentum = 1 - (1 - float(m.momentum or 0.0)) ** 0.5  # type: ignore[arg-type]
            bench.player.play(bench.segment, upto="backward")
            delta = [(m.running_mean - b).norm() for m, b in zip(chosen, before)]  # type: ignore[operator]
            moved.append(float(torch.stack(delta).norm()))
    return f"a step moves the running means by {moved[1]:.3g}, as it was by {moved[0]:.3g}"


@trial("less_dropout")
def less_dropout(bench: ReplaySession) -> str:
    """Dropout of 0.2 for all that is stronger than a half. Every update draws anew."""

    def ops(function: Any, args: Any, kwargs: Any) -> Any:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if getattr(function, "__name__", "?") not in DROPOUTS or not isinstance(p, float) or p <= 0.5:
            return function(*args, **kwargs)
        return function(args[0], 0.2, *args[2:], **{k: v for k, v in kwargs.items() if k != "p"})

    was, now = (bench.train(16, Intervention(ops=each, fresh_rng=True), repeat=True) for each in (None, ops))
    ends = [sum(losses[-4:]) / 4 for losses in (was, now)]
    better = "" if ends[1] < ends[0] else "no better: "
    ways = [f"{losses[0]:.4g} -> {end:.4g}" for losses, end in zip((was, now), ends)]
    return f"{better}loss {ways[1]} in 16 updates on this batch; as it was: {ways[0]}"


@trial("scaled_scores")
def scaled_scores(bench: ReplaySession) -> str:
    """Attention scores are held within 30 by a tanh."""

    def change(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        if name != "softmax" or args[0].dim() < 3:
            return function(*args, **kwargs)
        scores = args[0]
        capped = torch.where(scores > -1e4, 30 * torch.tanh(scores / 30), scores)
        return function(capped, *args[1:], **kwargs)

    return with_ops(bench, change)


@trial("balanced_router")
def balanced_router(bench: ReplaySession, *, experts: int) -> str:
    """What all samples have in common is taken from the router's scores, so that no expert is preferred by all."""

    def change(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        if name != "softmax" or args[0].shape[-1] != experts:
            return function(*args, **kwargs)
        scores = args[0]
        return function(scores - scores.flatten(0, -2).mean(0), *args[1:], **kwargs)

    return with_ops(bench, change)
