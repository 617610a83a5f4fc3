"""Whether a recorded step comes out as the same bits when it is run again."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession


@experiment("again", when="checkup")
def again(bench: ReplaySession) -> dict[str, Any]:
    """The loss and the gradients as they were, against those of a replay, and of a second one."""
    one = bench.run(upto="step")
    two = bench.run(upto="step")
    losses = [float(each) for each in bench.segment.losses]
    return {
        "losses_then": losses,
        "losses_now": [float(each) for each in one.losses],
        "same_losses": _equal(losses, [float(each) for each in one.losses]),
        "same_twice": _equal([float(e) for e in one.losses], [float(e) for e in two.losses])
        and all(_same(one.grads[name], two.grads[name]) for name in one.grads),
        "norm_then": float(bench.segment.grad_norm) if bench.segment.grad_norm is not None else None,
        "norm_now": one.grad_norm,
        "error": None if one.error is None else f"{type(one.error).__name__}: {one.error}",
        "carried": "carried" in bench.segment.values,
        "grafted": bool(bench.segment.values.get("grafted")),
    }


def _equal(ones: list[float], others: list[float]) -> bool:
    return len(ones) == len(others) and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(ones, others))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one.nan_to_num(), other.nan_to_num())


@experiment("smaller_lr", when="asked")
def smaller_lr(bench: ReplaySession) -> dict[str, Any]:
    """The loss of this step's batch after eight updates on it alone, with the learning rate and with a tenth."""
    as_it_was, tenth = bench.train(8, repeat=True), bench.train(8, Intervention(lr=0.1), repeat=True)
    return {"as_it_was": as_it_was, "tenth": tenth}
