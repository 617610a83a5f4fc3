"""Remedies for what does not listen to the mode of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.recorder.program import tensors_of
from trainwright.replay.experiments.modes import DROPS
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial


@trial("dropout_follows_mode")
def dropout_follows_mode(bench: ReplaySession) -> str:
    """In eval mode the same batch twice: as it is, and with every dropout told that it is not training."""

    def told(function: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "?")
        if name in DROPS:
            return args[0]
        off = {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return function(*args, **(kwargs | off))

    as_it_is, mended = _differ(bench, Intervention(mode="eval", fresh_rng=True)), _differ(bench, _with(told))
    return f"two passes in eval mode differ by {as_it_is:.1%}; with dropout only in train mode by {mended:.1%}"


def _with(around: Any) -> Intervention:
    return Intervention(mode="eval", fresh_rng=True, ops=around)


def _differ(bench: ReplaySession, edit: Intervention) -> float:
    """Two passes of one batch through the same weights, by what they give."""
    with bench.live(), torch.no_grad():
        one, two = (_outputs(bench.player.play(bench.segment, edit, upto="forward").outputs) for _ in range(2))
    if one.numel() == 0:
        raise NotTried("the models give nothing to compare")
    return float((one - two).norm() / (one.norm() + two.norm()).clamp_min(1e-30) * 2)


def _outputs(outputs: list[Any]) -> Tensor:
    made = [t.detach().double().flatten() for t in tensors_of(outputs) if t.is_floating_point()]
    return torch.cat(made) if made else torch.zeros(0)
