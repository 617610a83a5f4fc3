"""A healthy run as the reference of a watch: ``tw.watch(..., like="runs/healthy")``."""

from __future__ import annotations

from pathlib import Path

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.reference import MIN_STEPS, ReferenceFacts, traits_of
from trainwright.errors import UsageError
from trainwright.recorder.probes import Probe
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read_newest
from trainwright.runs.records import Examined, Watched


class ReferenceProbe(Probe):
    """Reports the traits of the reference run once.

    Args:
        run: The folder of the reference run, of ``tw.watch``, ``tw.fit`` or a recipe.

    Raises:
        UsageError: It is no run folder, or has no record of at least 8 steps.
    """

    name = ReferenceFacts.experiment

    def __init__(self, run: str | Path) -> None:
        folder = RunFolder.open(run)
        traits = traits_of(RunContext(read_newest(folder.log, (Watched, Examined)).records, finished=True))
        if traits.steps < MIN_STEPS:
            raise UsageError(
                f"like: {run} has records of {traits.steps} steps", remedy=f"name a run of at least {MIN_STEPS} steps"
            )
        self._facts: ReferenceFacts | None = ReferenceFacts(run=folder.path.name, traits=traits)

    def facts(self) -> ReferenceFacts | None:
        facts, self._facts = self._facts, None
        return facts
