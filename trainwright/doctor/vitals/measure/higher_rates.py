"""How much more the last steps had learned at higher learning rates."""

from __future__ import annotations

import math
from dataclasses import replace

from trainwright.doctor.measure.loss_calls import DRAWS
from trainwright.doctor.vitals.facts import HigherRatesFacts
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.again import losses_after, mean_of, surely, updates_of, way_from
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import AS_IT_WAS, Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict
from trainwright.state.snapshot import Snapshot

MUCH_MORE, MORE = 2.0, 1.5
"""Times what the rate took off the loss: by ten times the rate, and by three times."""
NEARLY = 5.0, 2.0
"""The same where the loss still falls nearly in proportion to the rate."""
BATCHES = 8
"""The last recorded batches, which the steps that are run again have not seen."""
LEAST = 16
"""Steps that are run again."""


@experiment(HigherRatesFacts.experiment, when="requested", steps=130.0)
def higher_rates(session: ReplaySession) -> Facts:
    """The recorded steps but for the last few, at three learning rates; the loss of these last few after each."""
    begin, steps = _way(session)
    way, unseen = steps[:-BATCHES], steps[-BATCHES:]
    names: set[str] = set()
    before = losses_after(session, begin, [], unseen, measured=_noting(names))
    after = [losses_after(session, begin, way, unseen, Intervention(lr=factor)) for factor in (1.0, 3.0, 10.0)]
    if not all(map(math.isfinite, (*before, *after[0]))):
        raise NotReplayable("a loss is not finite")
    once, thrice, tenfold = ([a - b if math.isfinite(b) else -math.inf for a, b in zip(before, row)] for row in after)

    def beats(tenfold_by: float, thrice_by: float) -> bool:
        pairs = (tenfold, tenfold_by), (thrice, thrice_by)
        return all(surely([b - times * a for a, b in zip(once, row)]) for row, times in pairs)

    facts = HigherRatesFacts(
        begin.step,
        session.step,
        before=mean_of(before),
        as_it_was=mean_of(after[0]),
        thrice=mean_of(after[1]),
        tenfold=mean_of(after[2]),
        fell=surely(once),
        surely=beats(MUCH_MORE, MORE),
        updates=updates_of(session),
        drawn=not DRAWS.isdisjoint(names),
        nearly_as=beats(*NEARLY),
    )
    return dict(strict(vars(facts)))


def _way(session: ReplaySession) -> tuple[Snapshot, list[RecordedStep]]:
    """The newest state that is long enough ago, and all steps since."""
    for begin in reversed(session.earlier):
        steps = way_from(session, begin, LEAST + BATCHES)
        if steps is not None:
            return begin, steps
    raise NotReplayable("no state of so long ago is held")


def _noting(names: set[str]) -> Intervention:
    """The step as it was; ``names`` gets those of the functions that are called."""

    def note(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        names.add(function_name(function))
        return function(*args, **kwargs)

    return replace(AS_IT_WAS, ops=note)
