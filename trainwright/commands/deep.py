"""``diagnose --deep``: runs the examinations for which a run had no time, from its folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.store import checkpoints
from trainwright.commands.replay import rerun
from trainwright.commands.replay.result import Rerun
from trainwright.commands.replay.trained import HISTORY_STEPS
from trainwright.errors import UsageError
from trainwright.replay.bundle import kind_of
from trainwright.report.diagnosis import diagnosis_of
from trainwright.report.examination import can_be_trained_again, while_it_trains
from trainwright.report.pages.report import leave_report
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.reader import RUNNING, read, state_of
from trainwright.runs.records import Ended, Examined, Found, Record, Unexamined, Watched
from trainwright.runs.writer import LogWriter

Say = Callable[[str], None]


def examine_later(folder: RunFolder, *, model: str | None, say: Say) -> None:
    """Run every examination on one step of a finished run, and append the results to its log.

    A run of a recipe, or of objects that a recorded function builds, is trained to that step from the newest checkpoint
    before it, in a separate folder. For any other run, the recorded last steps are replayed, if the run kept them
    because an examination had no time. ``model`` (``file.py:function``) then builds the model.

    Raises UsageError if the folder does not contain what is needed.
    """
    records = read(folder.log).records if folder.log.is_file() else ()
    if state_of(folder.path, records) == RUNNING:
        raise UsageError(f"{folder.path} is still running", remedy="wait until it ends, or stop it")
    if can_be_trained_again(folder.path):
        done = rerun(folder.path, _trained_step(folder, records), say=say)
    else:
        done = rerun(_last_steps(folder, records), model=model, say=say)
    if done.blind:
        raise UsageError(
            f"step {done.step} of {folder.path} cannot be replayed: {done.blind}",
            remedy=f"train it again: {while_it_trains(folder.path)} examines it while it trains",
        )
    _append(folder, done, records)
    leave_report(folder, say)


def _trained_step(folder: RunFolder, records: Sequence[Record]) -> int:
    """Return the step to examine: some steps after the newest checkpoint that is not the end of the run."""
    steps = [each.step for each in records if isinstance(each, Watched | Ended)]
    last = max(steps, default=0)
    if not last:
        raise UsageError(f"{folder.path} has no step that could be examined", remedy="train it for a few steps")
    older = [
        step for each in checkpoints(folder.checkpoints, identity_of(folder)) if (step := step_of(each) or 0) < last
    ]
    return min(max(older, default=0) + HISTORY_STEPS, last)


def _last_steps(folder: RunFolder, records: Sequence[Record]) -> str:
    bundles = [each.bundle or "" for each in records if isinstance(each, Unexamined)]
    kept = [name for name in bundles if re.fullmatch("step-[0-9]+", name)]  # no path out of the folder
    if not kept:
        had_time = any(isinstance(each, Unexamined) and not each.experiments for each in records)
        why = (
            "no examination was left out"
            if had_time
            else "the steps were recorded compactly as in tw.fit, or are larger than 64 MiB, or the run did not end"
        )
        raise UsageError(
            f"{folder.path} does not hold its last steps ({why})",
            remedy=f"train it again: {while_it_trains(folder.path)} examines it while it trains",
        )
    path = folder.bundles / kept[-1]
    if kind_of(path) is None:
        raise UsageError(f"{path} is gone", remedy=f"train it again: {while_it_trains(folder.path)} examines it")
    return str(path)


def _append(folder: RunFolder, done: Rerun, records: Sequence[Record]) -> None:
    """Write the new facts, then the findings from all facts together, with the remedies that were tried."""
    earlier = [each for each in records if isinstance(each, Unexamined)]
    spent = earlier[-1] if earlier else Unexamined(time_s=0, step=0, experiments=(), examined_s=0.0, trained_s=0.0)
    known = {each.code for each in records if isinstance(each, Found)}
    tried = {each.code: each.tried for each in done.findings if each.tried}
    with closing(LogWriter(folder.log)) as log:
        for each in done.examined:
            if isinstance(each, Examined):
                log.write(each)
        log.write(
            Unexamined(
                time_s=time.time(),
                step=done.step,
                experiments=tuple(done.unexamined),
                examined_s=spent.examined_s,
                trained_s=spent.trained_s,
                bundle=spent.bundle,
            )
        )
        report = diagnosis_of(folder)
        for found in (*report.findings, *report.added):
            if found.code not in known or (found.code in tried and not found.tried):
                tried_now = tried.get(found.code, found.tried)
                log.write(replace(found, tried=tried_now, time_s=found.time_s or time.time()))
