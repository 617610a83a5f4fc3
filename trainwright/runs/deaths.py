"""The crash-loop guard: a run that repeatedly dies in the same step starts again only if the user accepts it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainwright.errors import StorageError, UsageError
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.reader import read
from trainwright.runs.records import Ended, Record, Started, Step
from trainwright.runs.storage import make_subfolder, storage_error

CRASH_LOOP = "crash-loop"  # the name in --accept


@dataclass(frozen=True)
class Death:
    """The death of a process. ``time_s`` is the time of its last record; ``reason`` is None without an end record."""

    pid: int
    time_s: float
    reason: str | None

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        how = self.reason or "killed (no end record)"
        return f"process {self.pid}: {how} (last record {when})"


def deaths_in(records: Sequence[Record], step: int, dead: Sequence[int]) -> list[Death]:
    """Return what the log contains about the processes ``dead`` (pids), which died in ``step`` in a row; oldest first.

    The result may have fewer deaths than ``dead``, because a process that dies while it starts is not in the log.
    Processes in containers may have the same pid, so the search goes backwards and ends at a process that ended well
    or got past ``step``.
    """
    sessions: list[tuple[Started, list[Record]]] = []
    for record in records:
        if isinstance(record, Started):
            sessions.append((record, []))
        if sessions:
            sessions[-1][1].append(record)
    left, found = list(dead), list[Death]()
    for started, session in reversed(sessions):
        ends = [record for record in session if isinstance(record, Ended)]
        ended_well = any(end.ending != "failed" for end in ends)
        if ended_well or any(record.step > step for record in session if isinstance(record, Step)):
            break
        if started.pid in left:
            left.remove(started.pid)
            found.append(Death(started.pid, session[-1].time_s, ends[-1].reason if ends else None))
    return found[::-1]


def write_bundle(
    folder: RunFolder, step: int, checkpoint: Path | None, records: Sequence[Record], deaths: Sequence[Death]
) -> Path:
    """Write ``bundles/step-XXXXXXXX/``: everything needed to run ``step`` again.

    Hard links keep the checkpoint's files when the run deletes old checkpoints.

    checkpoint/     the files of the checkpoint that the run would resume from; empty when there is none
    recipe.yaml, plan.json, error.txt (if there is one)
    bundle.json     step, name of the checkpoint, the deaths, the last Step record

    Replaces an older bundle. Raises StorageError, and leaves nothing half-written under its name.
    """
    target = folder.bundles / f"step-{step:08d}"
    aside = target.with_name(f".{target.name}.draft")
    last_steps = [record for record in records if isinstance(record, Step)][-1:]
    summary = {
        "step": step,
        "checkpoint": checkpoint.name if checkpoint else None,
        "deaths": deaths,
        "last_step": last_steps[0] if last_steps else None,
    }
    try:
        shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed while it wrote
        make_subfolder(folder.bundles)
        aside.mkdir()  # raises for a link, which rmtree does not follow
        (aside / "checkpoint").mkdir()
        for file in checkpoint.iterdir() if checkpoint else ():
            _link(file, aside / "checkpoint" / file.name)
        for file in (folder.recipe, folder.plan, folder.path / "error.txt"):
            if file.exists():
                shutil.copy2(file, aside)
        folder.write_json(str((aside / "bundle.json").relative_to(folder.path)), summary)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
    except OSError as error:
        raise storage_error(error, target, "write") from error
    return target


def _link(source: Path, target: Path) -> None:
    """Make a hard link, which costs no space, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def require_no_crash_loop(
    folder: RunFolder,
    lock: RunLock,
    checkpoint: Path | None,
    accept: Sequence[str],
    again: Callable[[Sequence[str]], str],
) -> None:
    """Write a bundle and raise UsageError if the last processes of a run died in one step and not by chance.

    ``checkpoint`` is the checkpoint from which the run would resume. ``again`` returns the command that starts the run
    with the ``accept`` values passed to it.
    """
    step = lock.died_in_step
    if step is None or not lock.is_loop or CRASH_LOOP in accept:
        return
    records = read(folder.log).records if folder.log.is_file() else ()
    deaths = deaths_in(records, step, lock.dead)
    advice = "see what killed it (dmesg, the scheduler's log)"
    try:
        bundle = write_bundle(folder, step, checkpoint, records, deaths)
        kept = f"{bundle} has everything to run that step again"
        if (bundle / "error.txt").exists() and deaths and deaths[-1].reason:
            advice = f"read {bundle / 'error.txt'}"
    except StorageError as error:
        kept = f"no bundle was written to run that step again: {error.message}"
    times = "twice" if lock.deaths == 2 else f"{lock.deaths} times"
    lines = [f"  {death}" for death in deaths]
    if (unknown := lock.deaths - len(deaths)) and folder.log.is_file():
        who = "they" if not deaths else "the others" if unknown > 1 else "the other one"
        lines.append(f"  {who} died before anything was written to the log")
    raise UsageError(
        "\n".join([f"the run died in step {step} {times} in a row:", *lines, kept]),
        remedy=f"{advice}, fix the cause (for example data.quarantine, precision, optimizer.lr), and then "
        f"`{again([*accept, CRASH_LOOP])}` starts it once more",
    )
