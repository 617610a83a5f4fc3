"""The effect of an update on its own batch and on the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.doctor.facts.weights import AgainFacts, BatchStepsFacts, UpdateFacts
from trainwright.errors import text_of
from trainwright.recorder.calls import is_compiled
from trainwright.recorder.program import OptimizerStep
from trainwright.replay.experiments import replay
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession


@replay(UpdateFacts, when="checkup", value=3.0)
def update(session: ReplaySession) -> UpdateFacts:
    """Returns the change of the weights by the update, and the loss of the step's batch before and after it."""
    with session.live():
        result = session.replayer.run(session.recorded_step, upto="step")
        after = session.replayer.run(session.recorded_step, upto="forward")
    steps = [each for each in session.recorded_step.program if isinstance(each, OptimizerStep)]
    moved = [name for name in result.after if not torch.equal(result.after[name], result.before[name])]
    held = [name for name, grad in result.grads.items() if grad is not None]
    weight = norm_of(result.before, held)
    return UpdateFacts(
        loss=result.loss,
        after=after.loss,
        optimizers=len({each.optimizer for each in steps}),
        lr=tuple(float(group["lr"]) for each in steps for group in each.groups if "lr" in group),
        weight_decay=tuple(float(group.get("weight_decay") or 0.0) for each in steps for group in each.groups),
        decoupled=any(map(_is_decoupled, session.optimizers)),
        grad_norm=result.grad_norm,
        norm_at_clip=result.norm_at_clip,
        weight_norm=weight,
        ratio=norm_of({n: result.after[n] - result.before[n] for n in moved}, moved) / weight if weight else math.nan,
        input_rms=_rms(session.inputs),
        gradient_times_weight=sum(norm_of(result.grads, [name]) * norm_of(result.before, [name]) for name in held),
    )


def norm_of(tensors: Mapping[str, Tensor | None], names: list[str]) -> float:
    """Returns the norm of these tensors together."""
    chosen = [tensors[name] for name in names]
    return math.sqrt(sum(float(t.detach().to_dense().double().norm()) ** 2 for t in chosen if t is not None))


def _is_decoupled(optimizer: Optimizer) -> bool:
    flagged = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    return flagged or any(kind.__name__ == "AdamW" for kind in type(optimizer).__mro__)


def _rms(inputs: list[Tensor]) -> float | None:
    floats = [x for x in inputs if x.is_floating_point() and x.numel()]
    return max((float(x.double().square().mean().sqrt()) for x in floats), default=None)


@replay(BatchStepsFacts, when="requested", steps=40.0)
def batch_steps(session: ReplaySession) -> BatchStepsFacts:
    """Makes eight updates on this batch, and finds the first smaller learning rate at which its loss falls steadily."""
    was = session.train(8, repeat=True)
    for factor in (0.1, 0.01, 0.001):
        now = session.train(8, Intervention(lr=factor), repeat=True)
        if math.isfinite(now[-1]) and now[-1] < now[0] and max(now) <= now[0] + 1e-3 * abs(now[0]):
            return BatchStepsFacts(tuple(was), factor, now[-1])
    return BatchStepsFacts(tuple(was), None)


@replay(AgainFacts, when="unlimited")  # no check reads it, only ``trainwright replay`` and tests of exactness
def again(session: ReplaySession) -> AgainFacts:
    """Compares the recorded losses and gradient norm with a replay, and this replay with a second one.

    A compiled model is replayed uncompiled and rounds differently. Its losses may differ by ``tolerance``.
    """
    one, two = session.run(upto="step"), session.run(upto="step")
    losses, norm = [float(each) for each in one.losses], session.recorded_step.grad_norm
    tolerance = tolerance_of(session)
    return AgainFacts(
        same_losses=_equal([float(each) for each in session.recorded_step.losses], losses, tolerance),
        tolerance=tolerance,
        same_twice=_equal(losses, [float(each) for each in two.losses])
        and all(_same(one.grads[name], two.grads[name]) for name in one.grads),
        norm_then=None if norm is None else float(norm),
        norm_now=one.grad_norm,
        error=None if one.error is None else text_of(one.error),
    )


def tolerance_of(session: ReplaySession) -> float:
    """Returns the allowed relative difference: half of the digits of the dtype for a compiled model; else 0."""
    if not any(map(is_compiled, session.replayer.subject.modules)):
        return 0.0
    computed = {p.dtype for p in session.parameters.values() if p.is_floating_point()}
    computed |= {call.autocast[1] for call in session.recorded_step.calls if call.autocast[0]}
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in computed)) if computed else 0.0


def _equal(ones: list[float], others: list[float], tolerance: float = 0.0) -> bool:
    def same(one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))

    return len(ones) == len(others) and all(map(same, ones, others))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = (each.to_dense() if each.is_sparse else each for each in (one, other))
    return torch.equal(one.nan_to_num(), other.nan_to_num())
