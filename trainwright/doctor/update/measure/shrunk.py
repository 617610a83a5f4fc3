"""Makes the last steps again with what shrinks the weights between them, and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from trainwright.doctor.update.facts import ShrunkFacts, common_factor
from trainwright.doctor.update.measure.rates import MAX_STEPS
from trainwright.doctor.update.measure.replayed import written_before
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict


@experiment(ShrunkFacts.experiment, when="requested")
def weights_shrunk(session: ReplaySession) -> Facts:
    """The losses of the recorded steps, few of them in rounds, with such a factor after each update and without."""
    written = written_before(session)
    factor = common_factor(written)
    if factor is None or len(session.optimizers) != 1:
        raise NotReplayable("no common factor shrinks the weights, or several optimizers take turns")
    chosen = [session.parameters[each.name] for each in written]
    length = len(session.train(MAX_STEPS))
    rounds = max(1, MAX_STEPS // max(1, length))
    changed = Intervention(model=partial(_shrinking, session, chosen, factor))
    shrunk = session.train(MAX_STEPS, changed, rounds=rounds)
    without = session.train(MAX_STEPS, rounds=rounds)
    elements = sum(each.numel() for each in session.parameters.values())
    share = sum(each.numel() for each in chosen) / max(1, elements)
    return dict(strict(vars(ShrunkFacts(factor, share, tuple(shrunk), tuple(without)))))


@contextmanager
def _shrinking(session: ReplaySession, chosen: list[Tensor], factor: float) -> Iterator[None]:
    """A context in which every update is followed by that."""

    @torch.no_grad()
    def shrink(*_: object) -> None:
        for parameter in chosen:
            parameter.mul_(factor)

    with ExitStack() as undo:
        for optimizer in session.optimizers:
            undo.callback(optimizer.register_step_post_hook(shrink).remove)
        yield
