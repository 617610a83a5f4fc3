"""Trials of remedies for layers that ignore the mode of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.doctor.program.measure.modes import DROPOUTS
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial


@trial("dropout_follows_mode")
def dropout_follows_mode(session: ReplaySession) -> str:
    """Two passes over the batch in eval mode: as it is, and with every dropout switched off."""

    def without_dropout(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function)
        if name in DROPOUTS:
            return args[0]
        off = {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return function(*args, **(kwargs | off))

    as_it_is, fixed = (
        _difference(session, Intervention(mode="eval", fresh_rng=True, ops=ops)) for ops in (None, without_dropout)
    )
    return f"two passes in eval mode differ by {as_it_is:.1%}; with dropout only in train mode by {fixed:.1%}"


def _difference(session: ReplaySession, intervention: Intervention) -> float:
    """The relative difference of the outputs of two passes of one batch through the same weights."""
    with session.live(), torch.no_grad():
        one, two = (
            _outputs(session.replayer.run(session.recorded_step, intervention, upto="forward").outputs)
            for _ in range(2)
        )
    if one.numel() == 0:
        raise NotTried("the models return nothing to compare")
    return float((one - two).norm() / (one.norm() + two.norm()).clamp_min(1e-30) * 2)


def _outputs(outputs: object) -> Tensor:
    flat = [t.detach().double().flatten() for t in tensors_of(outputs) if t.is_floating_point()]
    return torch.cat(flat) if flat else torch.zeros(0, device="cpu")
