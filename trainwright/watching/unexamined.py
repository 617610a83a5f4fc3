"""What found no time to be examined: recorded at the end of a run, with the last steps to examine them later."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainwright.errors import StorageError
from trainwright.runlog import records
from trainwright.runlog.records import Record
from trainwright.watching.budget import ExaminationBudget
from trainwright.watching.experiments import ExperimentRunner

MAX_BUNDLE_BYTES = 64 * 2**20
"""The last steps and the state before them are kept where they take no more: about 0.3 s of a slow disk."""


def keep_rest(
    runner: ExperimentRunner, budget: ExaminationBudget, step: int, folder: Path | None, write: Callable[[Record], None]
) -> None:
    """Write an Unexamined record where experiments found no time, and a bundle of the last steps into ``folder``."""
    names = runner.not_run()
    if names and step:
        write(
            records.Unexamined(
                time_s=time.time(),
                step=step,
                experiments=tuple(names),
                examined_s=budget.examined_wall_s,
                trained_s=budget.trained_wall_s,
                bundle=None if folder is None else _kept(runner, step, folder),
            )
        )


def _kept(runner: ExperimentRunner, step: int, folder: Path) -> str | None:
    try:
        path = runner.keep_last(folder, step, MAX_BUNDLE_BYTES)
    except StorageError:  # a full disk: the record says that there is none
        return None
    return None if path is None else path.name
