"""How much more the last steps had learned at higher learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from torch import Tensor

from trainwright.doctor.loss.measure.scores import SAMPLES
from trainwright.doctor.vitals.facts import HigherRatesFacts
from trainwright.recorder.program import RecordedStep, alive
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import AS_IT_WAS, Intervention, NotReplayable
from trainwright.replay.session import ReplaySession, without_veto
from trainwright.runlog.json_values import Facts, strict
from trainwright.state.snapshot import Snapshot

MUCH_MORE, MORE = 2.0, 1.5
"""Times what the rate took off the loss: by ten times the rate, and by three times."""
BATCHES, SURE = 8, 2.0
"""The last recorded batches, which the steps that are run again have not seen; standard errors."""
LEAST = 16
"""Steps that are run again."""


@experiment(HigherRatesFacts.experiment, when="requested")
def higher_rates(session: ReplaySession) -> Facts:
    """The recorded steps but for the last few, at three learning rates; the loss of these last few after each."""
    begin, steps = _way(session)
    way, unseen = steps[:-BATCHES], steps[-BATCHES:]
    names: set[str] = set()
    before = _losses(session, begin, [], unseen, names)
    after = [_losses(session, begin, way, unseen, names, factor) for factor in (1.0, 3.0, 10.0)]
    if not all(map(math.isfinite, (*before, *after[0]))):
        raise NotReplayable("a loss is not finite")
    once, thrice, tenfold = ([a - b if math.isfinite(b) else -math.inf for a, b in zip(before, row)] for row in after)
    more = _surely([b - MORE * a for a, b in zip(once, thrice)])
    facts = HigherRatesFacts(
        begin.step,
        session.step,
        before=_mean(before),
        as_it_was=_mean(after[0]),
        thrice=_mean(after[1]),
        tenfold=_mean(after[2]),
        fell=_surely(once),
        surely=more and _surely([b - MUCH_MORE * a for a, b in zip(once, tenfold)]),
        updates=_updates(session),
        drawn=not SAMPLES.isdisjoint(names),
    )
    return dict(strict(vars(facts)))


def _way(session: ReplaySession) -> tuple[Snapshot, list[RecordedStep]]:
    """The newest state that is long enough ago, and all steps since."""
    for begin in reversed(session.earlier):
        steps = [each for each in session.recorded_steps if each.step >= begin.step]
        is_whole = len(steps) == session.step - begin.step + 1 and not any(each.blind for each in steps)
        if is_whole and len(steps) >= LEAST + BATCHES:
            for each in steps:
                each.program = alive(each.program)
            return begin, steps
    raise NotReplayable("no state of so long ago is held")


def _losses(
    session: ReplaySession,
    begin: Snapshot,
    way: Sequence[RecordedStep],
    unseen: Sequence[RecordedStep],
    names: set[str],
    factor: float = 1.0,
) -> list[float]:
    """The losses of ``unseen`` after the steps of ``way``. ``names`` gets those of the functions that are called."""

    def note(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        names.add(function_name(function))
        return function(*args, **kwargs)

    run = session.replayer.run
    with session.replayer.stage(begin):
        for each in way:
            run(without_veto(each), Intervention(lr=factor))
        how = AS_IT_WAS if way else replace(AS_IT_WAS, ops=note)
        return [run(each, how, upto="forward").loss for each in unseen]


def _updates(session: ReplaySession) -> int:
    """The most that an optimizer has counted for a parameter."""
    counted = [state.get("step", 0) for each in session.optimizers for state in each.state.values()]
    return max((int(each) for each in counted if isinstance(each, int | float | Tensor)), default=0)


def _surely(rows: Sequence[float]) -> bool:
    """Whether the mean is above 0 by two standard errors."""
    return all(map(math.isfinite, rows)) and fmean(rows) > SURE * stdev(rows) / math.sqrt(len(rows))


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf
