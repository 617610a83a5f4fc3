"""Recorded steps that are made again in another way, and the losses of the batches that followed them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from torch import Tensor

from trainwright.checkpoint.snapshot import Snapshot
from trainwright.recorder.program import RecordedStep, alive
from trainwright.replay.replayer import AS_IT_WAS, Intervention
from trainwright.replay.session import ReplaySession, without_veto

SURE = 2.0
"""Standard errors."""


def way_from(session: ReplaySession, begin: Snapshot, least: int) -> list[RecordedStep] | None:
    """All steps since a state up to the newest, ``least`` of them at least; None where one is missing."""
    steps = [each for each in session.recorded_steps if each.step >= begin.step]
    if len(steps) != session.step - begin.step + 1 or any(each.blind for each in steps) or len(steps) < least:
        return None
    for each in steps:
        each.program = alive(each.program)
    return steps


def losses_after(
    session: ReplaySession,
    begin: Snapshot,
    way: Sequence[RecordedStep],
    unseen: Sequence[RecordedStep],
    change: Intervention = AS_IT_WAS,
    measured: Intervention = AS_IT_WAS,
) -> list[float]:
    """The losses of ``unseen``, each ``measured`` so, after the steps of ``way`` with a change. A step is made with its
    update, also where that was vetoed."""
    with session.replayer.stage(begin):
        for each in way:
            session.replayer.run(without_veto(each), change)
        return [session.replayer.run(each, measured, upto="forward").loss for each in unseen]


def surely(rows: Sequence[float]) -> bool:
    """Whether the mean is above 0 by two standard errors."""
    return all(map(math.isfinite, rows)) and fmean(rows) > SURE * stdev(rows) / math.sqrt(len(rows))


def mean_of(losses: Sequence[float]) -> float:
    """Infinite where one is not finite."""
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


def updates_of(session: ReplaySession) -> int:
    """The most that an optimizer has counted for a parameter in its life; 0 where none counts."""
    counted = [state.get("step", 0) for each in session.optimizers for state in each.state.values()]
    return max((int(each) for each in counted if isinstance(each, int | float | Tensor)), default=0)
