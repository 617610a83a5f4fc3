"""Whether a recorded step gives the same bits when it is run again."""

from __future__ import annotations

import math

import torch

from trainwright.recorder.calls import is_compiled
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import error_text
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts


@experiment("again", when="checkup")
def again(session: ReplaySession) -> Facts:
    """Compares the recorded losses and gradient norm with those of a replay, and that replay with a second one.

    A compiled model is replayed as it is written, and rounds in other places: its losses may differ by ``tolerance``.
    """
    one, two = session.run(upto="step"), session.run(upto="step")
    losses = [float(each) for each in one.losses]
    tolerance = tolerance_of(session)
    return {
        "same_losses": _equal([float(each) for each in session.recorded_step.losses], losses, tolerance),
        "tolerance": tolerance,
        "same_twice": _equal(losses, [float(each) for each in two.losses])
        and all(_same(one.grads[name], two.grads[name]) for name in one.grads),
        "norm_then": float(session.recorded_step.grad_norm) if session.recorded_step.grad_norm is not None else None,
        "norm_now": one.grad_norm,
        "error": error_text(one.error),
    }


def tolerance_of(session: ReplaySession) -> float:
    """Relative: half of the digits of the coarsest type that a compiled model computes with; else 0, the same bits."""
    if not any(map(is_compiled, session.replayer.subject.modules)):
        return 0.0
    computed = {p.dtype for p in session.parameters.values() if p.is_floating_point()}
    computed |= {call.autocast[1] for call in session.recorded_step.calls if call.autocast[0]}
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in computed)) if computed else 0.0


def _equal(ones: list[float], others: list[float], tolerance: float = 0.0) -> bool:
    def same(one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))

    return len(ones) == len(others) and all(map(same, ones, others))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one.nan_to_num(), other.nan_to_num())
