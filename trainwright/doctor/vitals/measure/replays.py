"""Replays that tell whether the loss depends on what stands still, and what another learning rate would do."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from trainwright.doctor.vitals.facts import OtherRatesFacts, StillnessFacts, StillTensor
from trainwright.recorder.program import OptimizerStep
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention
from trainwright.replay.scaled import scaled_outputs
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

MOST_TENSORS = 16
"""Whose effect on the loss is measured one by one."""
SHARE = 0.3
"""Of its own size by which a weight is changed; one of zeros by as much of a fresh one."""
ROUNDING = 1e-5
"""Of a loss in float32, relative: a smaller change is none."""
UPDATES = 8
FACTORS = (1.0, 1e2, 1e3, 1e4, 1e5)
ENOUGH = 0.7
"""Of the loss is left, or less: a larger rate need not be tried."""


@experiment(StillnessFacts.experiment, when="requested")
def stillness(session: ReplaySession) -> Facts:
    """Changes the weights that get no gradient, and looks whether the loss changes: first all, then one by one."""
    grads = session.run().grads
    held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}
    still = [
        name
        for name, p in session.parameters.items()
        if p.requires_grad and id(p) in held and not _has_any(grads.get(name))
    ]
    if not still:
        return dict(strict(vars(StillnessFacts())))
    with session.live():
        loss = _loss(session)
        ignores_shifts = math.isclose(_loss(session, shift=1.0), loss, rel_tol=ROUNDING)
    if _effect(session, still, loss) == 0.0:
        effects = dict.fromkeys(still, 0.0)
    else:
        effects = {name: _effect(session, [name], loss) for name in still[:MOST_TENSORS]}
    reached = {name for name in still if grads.get(name) is not None}
    cancels = {
        name for name in still if name.endswith("bias") and _has_any(grads.get(name.removesuffix("bias") + "weight"))
    }
    if ignores_shifts:  # it is made of differences or slopes of outputs: what is added to all has no gradient
        cancels |= {name for name in reached if session.parameters[name].dim() < 2}
    rows = [
        StillTensor(name=name, effect=effects[name], reached=name in reached, cancels=name in cancels)
        for name in effects
    ]
    return dict(strict(vars(StillnessFacts(tensors=tuple(rows)))))


def _has_any(grad: Tensor | None) -> bool:
    return grad is not None and bool((grad.to_dense() if grad.is_sparse else grad).abs().sum() > 0)


def _loss(session: ReplaySession, shift: float = 0.0) -> float:
    """The loss with outputs that are so much larger. In float64: there a difference that cancels is 0 beside any loss.

    Must be called within ``session.live()``.
    """
    change = Intervention(dtype="fp64", model=partial(scaled_outputs, session, 1.0, shift))
    return session.replayer.run(session.recorded_step, change, upto="forward").loss


def _effect(session: ReplaySession, names: list[str], loss: float) -> float:
    """The change of the loss where these weights are changed, relative to it; 0 within its rounding."""
    generator = torch.Generator().manual_seed(0)
    with session.live():
        with torch.no_grad():
            for name in names:
                p = session.parameters[name]
                size = float(p.detach().float().square().mean().sqrt()) or 1.0 / math.sqrt(max(1, p.shape[-1:].numel()))
                p.add_((SHARE * size * torch.randn(p.shape, generator=generator, device="cpu")).to(p))
        now = _loss(session)
    change = abs(now - loss) / max(abs(loss), 1e-12)
    return change if not math.isfinite(change) or change > ROUNDING else 0.0


@experiment(OtherRatesFacts.experiment, when="requested", steps=54.0)
def other_rates(session: ReplaySession) -> Facts:
    """The losses of a few updates on this batch alone, by a factor of the learning rate."""
    losses: list[tuple[float, ...]] = []
    for factor in FACTORS:
        losses.append(tuple(session.train(UPDATES, Intervention(lr=factor), repeat=True)))
        if losses[-1][-1] < ENOUGH * losses[-1][0]:
            break
    steps = [each for each in session.recorded_step.program if isinstance(each, OptimizerStep)]
    lr = max((float(group.get("lr", 0.0)) for each in steps for group in each.groups), default=0.0)
    return dict(strict(vars(OtherRatesFacts(factors=FACTORS[: len(losses)], losses=tuple(losses), lr=lr))))
