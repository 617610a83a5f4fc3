"""Recorded steps that are made again in another way, and the losses of the batches that followed them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from torch import Tensor

from trainwright.recorder.program import RecordedStep, alive
from trainwright.replay.replayer import AS_IT_WAS, Intervention, NotReplayable
from trainwright.replay.session import ReplaySession, without_veto
from trainwright.state.snapshot import Snapshot

SURE = 2.0
"""Standard errors."""
BEGIN, LEAST, BATCHES = 4, 12, 8
"""The latest step that is the begin of a run; the fewest steps that are made again; the last recorded batches, which
these have not seen."""


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


@dataclass(frozen=True)
class ComparedLosses:
    """Losses of the batches that followed the first steps, before these and after them: as they were, and changed.

    ``surely``: after the changed ones they are lower, by two standard errors, or in each batch (some may be far off).
    """

    since: int
    until: int
    before: float
    after: float
    before_without: float
    after_without: float
    surely: bool


class FirstSteps:
    """The first steps of a run, to be made again with changes. Raises NotReplayable where they are no longer held."""

    def __init__(self, session: ReplaySession) -> None:
        begin = begin_of(session)
        steps = way_from(session, begin, LEAST + BATCHES)
        if steps is None:
            raise NotReplayable("the begin of the run is not held any more")
        self._session, self._begin = session, begin
        self._way, self._unseen = steps[:-BATCHES], steps[-BATCHES:]
        self._first, self._after = self._losses(begin, AS_IT_WAS, AS_IT_WAS)

    def _losses(self, begin: Snapshot, change: Intervention, measured: Intervention) -> list[list[float]]:
        """Before these steps and after them."""
        return [losses_after(self._session, begin, way, self._unseen, change, measured) for way in ([], self._way)]

    def compared(self, change: Intervention, measured: Intervention, begin: Snapshot | None = None) -> ComparedLosses:
        """What they come to with a change, from another ``begin``; the losses of that are ``measured`` so."""
        start, end = self._losses(begin or self._begin, change, measured)
        gains = [a - b for a, b in zip(self._after, end)]
        return ComparedLosses(
            self._begin.step, self._session.step,
            before=mean_of(self._first), after=mean_of(self._after),
            before_without=mean_of(start), after_without=mean_of(end),
            surely=surely(gains) or all(gain > 0.0 for gain in gains),
        )  # fmt: skip

    def best(self, tried: Iterable[tuple[Intervention, Intervention]]) -> tuple[int, ComparedLosses]:
        """Which change, each with how the losses are measured, leaves the lowest losses, and what it comes to."""
        compared = [self.compared(change, measured) for change, measured in tried]
        return min(enumerate(compared), key=lambda each: each[1].after_without)


def begin_of(session: ReplaySession) -> Snapshot:
    """The state before the first steps. Raises NotReplayable where it is no longer held."""
    begin = next((each for each in session.earlier if each.step <= BEGIN), None)
    if begin is None:
        raise NotReplayable("the begin of the run is not held any more")
    return begin


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
