"""How far the loss goes on falling in the direction in which the last steps went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean, stdev

import torch
from torch import Tensor

from trainwright.doctor.vitals.facts import ReachFacts
from trainwright.recorder.program import RecordedStep, alive
from trainwright.replay.again import updates_of
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.scaled import scaled_outputs
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
SAME = 1e-4
"""Of the larger of two losses, apart by rounding."""


@experiment(ReachFacts.experiment, when="requested", steps=9.0)
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
    endless = surely and _is_endless(session, chosen[-1])
    facts = ReachFacts(begin.step, session.step, before, here, beyond, surely, updates_of(session), endless)
    return dict(strict(vars(facts)))


def _is_endless(session: ReplaySession, recorded: RecordedStep) -> bool:
    """Whether the loss is twice as large for outputs twice as large, and the same for outputs that are all more by 1.

    Then it is a difference of outputs without a minimum: it falls as long as they grow, in a straight line.
    """
    losses = []
    with session.live():
        for factor, more in ((1.0, 0.0), (2.0, 0.0), (1.0, 1.0)):
            change = Intervention(model=partial(scaled_outputs, session, factor, more))
            result = session.replayer.run(recorded, change, upto="forward")
            if result.error is not None:
                return False
            losses.append(result.loss)
    once, twice, more_by_1 = losses
    room = SAME * max(abs(once), abs(twice))
    return abs(twice - 2 * once) <= room < abs(twice - once) and abs(more_by_1 - once) <= max(room, SAME)


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


@torch.no_grad()
def _go(parameters: Sequence[Tensor], begin: Sequence[Tensor], now: Sequence[Tensor], times: float) -> None:
    """Puts the weights so many times as far from ``begin`` as they are ``now``."""
    for p, one, other in zip(parameters, begin, now):
        if p.is_floating_point():
            p.copy_(one + times * (other - one))
