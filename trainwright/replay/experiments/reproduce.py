"""Whether a recorded step gives the same bits when it is run again."""

from __future__ import annotations

import math

import torch

from trainwright.replay.experiments import experiment
from trainwright.replay.functions import error_text
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts


@experiment("again", when="checkup")
def again(session: ReplaySession) -> Facts:
    """Compares the recorded losses and gradient norm with those of a replay, and that replay with a second one."""
    one, two = session.run(upto="step"), session.run(upto="step")
    losses = [float(each) for each in one.losses]
    return {
        "same_losses": _equal([float(each) for each in session.recorded_step.losses], losses),
        "same_twice": _equal(losses, [float(each) for each in two.losses])
        and all(_same(one.grads[name], two.grads[name]) for name in one.grads),
        "norm_then": float(session.recorded_step.grad_norm) if session.recorded_step.grad_norm is not None else None,
        "norm_now": one.grad_norm,
        "error": error_text(one.error),
    }


def _equal(ones: list[float], others: list[float]) -> bool:
    return len(ones) == len(others) and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(ones, others))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one.nan_to_num(), other.nan_to_num())
