"""Replays: whether the loss depends on weights that stand still, and what other learning rates would do."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from trainwright.doctor.facts.weights import OtherRatesFacts, StillFacts, StillTensor
from trainwright.recorder.program import OptimizerStep
from trainwright.replay.experiments import replay
from trainwright.replay.replayer import Intervention
from trainwright.replay.scaled import scaled_outputs
from trainwright.replay.session import ReplaySession

MAX_TENSORS = 16
"""Whose effect on the loss is measured one by one."""
CHANGE = 0.3
"""Fraction of its size by which a weight is changed; one of zeros by as much of a fresh one."""
ROUNDING = 1e-5
"""Relative to a loss in float32: a smaller change is none."""
UPDATES = 8
FACTORS = (1.0, 1e2, 1e3, 1e4, 1e5)
ENOUGH = 0.7
"""Where so much of the loss is left, or less, a larger rate need not be tried."""


@replay(StillFacts, when="requested")
def still_weights(session: ReplaySession) -> StillFacts:
    """Changes the weights that get no gradient, first all, then one by one, and compares the loss."""
    grads = session.run().grads
    held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [name for name, p in session.parameters.items() if p.requires_grad and id(p) in held]
    still = [name for name in trained if not _has_any(grads.get(name))]
    if not still:
        return StillFacts()
    with session.live():
        loss = _loss(session)
        ignores_shifts = math.isclose(_loss(session, shift=1.0), loss, rel_tol=ROUNDING)
    if _effect(session, still, loss) == 0.0:
        effects = dict.fromkeys(still, 0.0)
    else:
        effects = {name: _effect(session, [name], loss) for name in still[:MAX_TENSORS]}
    reached = {name for name in still if grads.get(name) is not None}
    biases = {name: name.removesuffix("bias") + "weight" for name in still if name.endswith("bias")}
    cancels = {name for name, weight in biases.items() if _has_any(grads.get(weight))}
    if ignores_shifts:  # it is made of differences or slopes of outputs: what is added to all has no gradient
        cancels |= {name for name in reached if session.parameters[name].dim() < 2}
    return StillFacts(
        tensors=tuple(
            StillTensor(name=name, effect=effect, reached=name in reached, cancels=name in cancels)
            for name, effect in effects.items()
        )
    )


def _has_any(grad: Tensor | None) -> bool:
    return grad is not None and bool((grad.to_dense() if grad.is_sparse else grad).abs().sum() > 0)


def _loss(session: ReplaySession, shift: float = 0.0) -> float:
    """The loss with outputs that are so much larger, in float64: a difference that cancels is 0 there."""
    change = Intervention(dtype="fp64", model=partial(scaled_outputs, session, 1.0, shift))
    return session.replayer.run(session.recorded_step, change, upto="forward").loss


def _effect(session: ReplaySession, names: list[str], loss: float) -> float:
    """The relative change of the loss where these weights are changed; 0 within its rounding."""
    generator = torch.Generator().manual_seed(0)
    with session.live():
        with torch.no_grad():
            for name in names:
                p = session.parameters[name]
                size = float(p.detach().float().square().mean().sqrt()) or 1.0 / math.sqrt(max(1, p.shape[-1:].numel()))
                p.add_((CHANGE * size * torch.randn(p.shape, generator=generator, device="cpu")).to(p))
        now = _loss(session)
    change = abs(now - loss) / max(abs(loss), 1e-12)
    return change if not math.isfinite(change) or change > ROUNDING else 0.0


@replay(OtherRatesFacts, when="requested", steps=54.0)
def other_rates(session: ReplaySession) -> OtherRatesFacts:
    """The losses of a few updates on this batch alone, by a factor of the learning rate."""
    losses: list[tuple[float, ...]] = []
    for factor in FACTORS:
        losses.append(tuple(session.train(UPDATES, Intervention(lr=factor), repeat=True)))
        if losses[-1][-1] < ENOUGH * losses[-1][0]:
            break
    steps = [each for each in session.recorded_step.program if isinstance(each, OptimizerStep)]
    lr = max((float(group.get("lr", 0.0)) for each in steps for group in each.groups), default=0.0)
    return OtherRatesFacts(factors=FACTORS[: len(losses)], losses=tuple(losses), lr=lr)
