"""Trials of remedies for faults of layers: activations, BatchNorm, dropout, attention, routers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.doctor.function.remedy.structure import compared, kaiming_, once
from trainwright.doctor.measure.modes import DROPOUTS
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import argument, function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import trial


@trial("revived")
def revived(session: ReplaySession, *, module: str) -> str:
    """Biases of 0 where they are far below what the weights contribute; if there are none, LeakyReLU for ReLU."""
    maps = [m for m in session.modules.values() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    layers = [(m.weight, m.bias) for m in maps if m.bias is not None]

    def is_outweighed(weight: Tensor, bias: Tensor) -> Tensor:
        norms: Tensor = weight.detach().flatten(1).norm(dim=1)
        return bias.detach() < -4 * norms

    def change() -> None:
        for weight, bias in layers:
            bias.data[is_outweighed(weight, bias)] = 0.0

    if any(bool(is_outweighed(weight, bias).any()) for weight, bias in layers):
        return "bias 0: " + compared(session, Intervention(model=once(change)))

    def leaky(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        is_relu = function_name(function) in ("relu", "relu_")
        return F.leaky_relu(args[0], 0.01) if is_relu else function(*args, **kwargs)

    return "LeakyReLU: " + compared(session, Intervention(ops=leaky))


@trial("relu_for_sigmoid")
def relu_for_sigmoid(session: ReplaySession) -> str:
    """ReLU for every sigmoid and tanh, with weights initialised for ReLU."""
    matrices = [m.weight for m in session.modules.values() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]

    def ops(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) in ("sigmoid", "tanh", "hardsigmoid", "softsign"):
            return args[0].relu()
        return function(*args, **kwargs)

    def draw() -> None:
        for weight in matrices:
            kaiming_(weight)
        matrices[-1].data.mul_(0.1)

    was = _first_gradient(session, Intervention(), matrices)
    now = _first_gradient(session, Intervention(ops=ops, model=once(draw)), matrices)
    better = "" if now > 100 * was else "no better: "
    outcome = compared(session, Intervention(ops=ops, model=once(draw)))
    return f"{better}the first layer's gradient is {now:.1e} of the largest, as it was {was:.1e}; {outcome}"


def _first_gradient(session: ReplaySession, intervention: Intervention, matrices: Sequence[Tensor]) -> float:
    """The gradient norm of the first of ``matrices``, as a share of the largest."""
    names = {id(p): name for name, p in session.parameters.items()}
    grads = session.run(intervention).grads
    sizes = [float(g.norm()) for w in matrices if (g := grads.get(names.get(id(w), ""))) is not None]
    return sizes[0] / max(*sizes, 1e-300) if sizes else 0.0


@trial("group_norm")
def group_norm(session: ReplaySession) -> str:
    """GroupNorm in place of BatchNorm."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) != "batch_norm":
            return function(*args, **kwargs)
        channels = args[0].shape[1]
        groups = max(n for n in (1, 2, 4) if channels % n == 0)
        arguments = inspect.signature(F.batch_norm).bind(*args, **kwargs).arguments
        return F.group_norm(args[0], groups, arguments.get("weight"), arguments.get("bias"))

    return compared(session, Intervention(ops=change))


@trial("momentum_root", steps=3.0)
def momentum_root(session: ReplaySession, *, modules: Sequence[str]) -> str:
    """A momentum of these BatchNorms with which two updates move the running statistics as far as one did."""
    norms = [m for path in modules if isinstance(m := session.modules[path], _BatchNorm)]
    moved = []
    for root in (False, True):
        with session.live():
            before = [_mean(m).clone() for m in norms]
            for m in norms if root else ():
                m.momentum = 1 - (1 - float(m.momentum or 0.0)) ** 0.5
            session.replayer.run(session.recorded_step, upto="backward")
            moved.append(float(torch.stack([(_mean(m) - b).norm() for m, b in zip(norms, before)]).norm()))
    return f"a step moves the running means by {moved[1]:.3g}, as it was by {moved[0]:.3g}"


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


@trial("less_dropout", steps=43.0)
def less_dropout(session: ReplaySession) -> str:
    """Dropout of 0.2 in place of every dropout above 0.5. Every update draws new masks."""

    def ops(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        p = argument(args, kwargs, 1, "p", 0.5)
        if function_name(function) not in DROPOUTS or not isinstance(p, float) or p <= 0.5:
            return function(*args, **kwargs)
        return function(args[0], 0.2, *args[2:], **{k: v for k, v in kwargs.items() if k != "p"})

    was, now = (session.train(16, Intervention(ops=each, fresh_rng=True), repeat=True) for each in (None, ops))
    ends = [sum(losses[-4:]) / 4 for losses in (was, now)]
    better = "" if ends[1] < ends[0] else "no better: "
    courses = [f"{losses[0]:.4g} -> {end:.4g}" for losses, end in zip((was, now), ends)]
    return f"{better}loss {courses[1]} in 16 updates on this batch; as it was: {courses[0]}"


@trial("scaled_scores")
def scaled_scores(session: ReplaySession) -> str:
    """Attention scores soft-capped at 30 by a tanh."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) != "softmax" or args[0].dim() < 3:
            return function(*args, **kwargs)
        scores = args[0]
        capped = torch.where(scores > -1e4, 30 * torch.tanh(scores / 30), scores)
        return function(capped, *args[1:], **kwargs)

    return compared(session, Intervention(ops=change))


@trial("balanced_router")
def balanced_router(session: ReplaySession, *, experts: int) -> str:
    """The mean over all samples is subtracted from the router's scores, so that no expert is preferred by all."""

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) != "softmax" or args[0].shape[-1] != experts:
            return function(*args, **kwargs)
        scores = args[0]
        return function(scores - scores.flatten(0, -2).mean(0), *args[1:], **kwargs)

    return compared(session, Intervention(ops=change))
