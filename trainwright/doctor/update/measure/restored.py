"""Makes the last steps again with the gradients of their backward passes."""

from __future__ import annotations

from trainwright.doctor.update.facts import RestoredFacts
from trainwright.doctor.update.measure.rates import MAX_STEPS
from trainwright.replay.experiments import experiment
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict


@experiment(RestoredFacts.experiment, when="requested")
def gradients_restored(session: ReplaySession) -> Facts:
    """The losses of the recorded steps; a replay leaves out what the loop does to gradients by hand."""
    return dict(strict(vars(RestoredFacts(tuple(session.train(MAX_STEPS))))))
