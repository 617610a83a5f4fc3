"""How far the loss goes on falling in the direction in which the last steps went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from trainwright.doctor.vitals.facts import ReachFacts
from trainwright.recorder.program import alive
from trainwright.replay.again import updates_of
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

TIMES = (0.0, 1.0, 3.0)
"""The way of the last steps: none of it, itself, and straight on."""
ENOUGH = 1.5
"""Times what the way took off the loss: straight on it takes off less, where the gradient turns or becomes smaller."""
BATCHES, SURE = 8, 2.0
"""The last recorded batches, on which the loss is measured; standard errors, at each of two looks."""
LEAST = 16
"""Steps that are a way."""


@experiment(ReachFacts.experiment, when="requested")
def reach(session: ReplaySession) -> Facts:
    """The losses of the last batches on the straight line through the weights of earlier and of now."""
    earlier = [each for each in session.earlier if session.step - each.step >= LEAST]
    chosen = [each for each in session.recorded_steps if each.blind is None][-BATCHES:]
    if not earlier or len(chosen) < BATCHES:
        raise NotReplayable("no state of so long ago is held")
    for recorded in chosen:
        recorded.program = alive(recorded.program)
    parameters, begin = session.replayer.subject.parameters, earlier[0]
    losses = []
    with session.live():
        now = [p.detach().clone() for p in parameters]
        for times in TIMES:
            _go(parameters, begin.parameters, now, times)
            losses.append([session.replayer.run(each, upto="forward").loss for each in chosen])
    if not all(map(math.isfinite, (loss for row in losses[:2] for loss in row))):
        raise NotReplayable("a loss is not finite")
    once = [a - b for a, b in zip(losses[0], losses[1])]
    thrice = [a - b if math.isfinite(b) else -math.inf for a, b in zip(losses[0], losses[2])]
    more = [b - ENOUGH * a for a, b in zip(once, thrice)]
    surely = all(map(math.isfinite, more)) and fmean(more) > SURE * stdev(more) / math.sqrt(len(more))
    before, here, beyond = map(_mean, losses)
    facts = ReachFacts(begin.step, session.step, before, here, beyond, surely, updates_of(session))
    return dict(strict(vars(facts)))


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


@torch.no_grad()
def _go(parameters: Sequence[Tensor], begin: Sequence[Tensor], now: Sequence[Tensor], times: float) -> None:
    """Puts the weights so many times as far from ``begin`` as they are ``now``."""
    for p, one, other in zip(parameters, begin, now):
        if p.is_floating_point():
            p.copy_(one + times * (other - one))
