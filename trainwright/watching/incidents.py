"""Writes bundles for later replays: of incidents, and of the last steps if an experiment was skipped to save time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainwright.checkpoint.snapshot import LiveObjects, put_back
from trainwright.errors import StorageError
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ring import Ring
from trainwright.replay.bundle import prune
from trainwright.runs import records
from trainwright.runs.records import Record
from trainwright.watching.budget import ExaminationBudget
from trainwright.watching.experiments import ExperimentRunner


class Incidents:
    """Writes bundles into ``folder`` (None: no bundles), and passes its records to ``write``."""

    def __init__(self, folder: Path | None, runner: ExperimentRunner, write: Callable[[Record], None]) -> None:
        self._folder = folder
        self._runner = runner
        self._write = write
        self._count = 0

    def keep_bundle(self, step: int, codes: Sequence[str]) -> None:
        """Writes the bundle of an incident, if it is the 1st, 2nd, 4th, 8th, ... of the run."""
        self._count += 1
        if self._folder is None or self._count & (self._count - 1):
            return
        try:
            self._runner.keep(self._folder, step, {"findings": list(codes)})
            prune(self._folder)
        except StorageError as error:
            self._write(records.NotSaved(time_s=time.time(), step=step, reason=f"no bundle: {error}"))

    def note_veto(self, step: RecordedStep, ring: Ring, objects: LiveObjects) -> bool:
        """Records a skipped update. For a rollback, restores an earlier state and returns True."""
        reason = str(step.values["vetoed"])
        to_undo = reason == "spike" and step.values["spike"][-1] == "rollback"
        snapshot = ring.before(step.step) if to_undo else None
        if snapshot is None:
            self.note_skipped([step], reason)
            return False
        put_back(objects, snapshot)
        since = [each for each in ring.steps if snapshot.step <= each.step <= step.step]
        undone = [each for each in since if each is step or "vetoed" not in each.values]
        self.note_skipped(undone, f"spike in step {step.step}: back to the state before step {snapshot.step}")
        return True

    def note_skipped(self, steps: Sequence[RecordedStep], reason: str) -> None:
        """Writes a Skipped record for each update that was skipped or undone."""
        for each in steps:
            self._write(
                records.Skipped(
                    time_s=time.time(),
                    step=each.step,
                    reason=reason,
                    micro_batch=None,
                    sample_ids=tuple(i for of_batch in each.ids for i in of_batch or ()),
                    scale_before=None,
                    scale_after=None,
                )
            )


MAX_BUNDLE_BYTES = 64 * 2**20
"""Maximum size of the bundle of the last steps. A slow disk writes it in about 0.3 s."""


def keep_rest(
    runner: ExperimentRunner, budget: ExaminationBudget, step: int, folder: Path | None, write: Callable[[Record], None]
) -> None:
    """Writes an Unexamined record and a bundle of the last steps if experiments were skipped to save time."""
    names = runner.not_run()
    if names and step:
        write(
            records.Unexamined(
                time_s=time.time(),
                step=step,
                experiments=tuple(names),
                examined_s=budget.spent_s,
                trained_s=budget.trained_s,
                bundle=None if folder is None else _kept(runner, step, folder),
            )
        )


def _kept(runner: ExperimentRunner, step: int, folder: Path) -> str | None:
    try:
        path = runner.keep_last(folder, step, MAX_BUNDLE_BYTES)
    except StorageError:  # a full disk: the record lists no bundle
        return None
    return None if path is None else path.name
