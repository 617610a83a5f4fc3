"""Resumes a run: finds its newest intact checkpoint, reports all differences to the earlier part, and loads it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

from trainwright.checkpoint.checkpoint import load_checkpoint, mismatches, read_run_metadata
from trainwright.checkpoint.contents import (
    AMOUNT,
    ANYTHING,
    NATURAL,
    TEXT,
    Kind,
    Maybe,
    Rule,
    require_whole,
    violations,
)
from trainwright.checkpoint.cursor import Cursor
from trainwright.checkpoint.manifest import invalid_content, raising_checkpoint_error, read_state, step_of
from trainwright.checkpoint.remote import fetch_run
from trainwright.checkpoint.store import checkpoints, newest_valid, set_aside_newer
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import Launch
from trainwright.engine.precision import PrecisionName
from trainwright.errors import CheckpointError, StorageError, UsageError
from trainwright.plan.batch import batch_of
from trainwright.plan.make import ResumedValues, RunFacts, Spent, SwaPlan, choose_precision
from trainwright.plan.resume_changes import Change, CommandWith, compare, on_command_line, require_accepted
from trainwright.recipe import Duration, Recipe, load
from trainwright.recipe.resolve import is_live
from trainwright.runs.deaths import CRASH_LOOP, require_no_crash_loop
from trainwright.runs.files import UnreadableFile
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.lock import NoLock, RunLock
from trainwright.runs.reader import KILLED, UNUSED, Usage, read_end, read_usage, state_of
from trainwright.runs.secrets import masked
from trainwright.runs.shapes import PlanFile, ProvenanceFile, read_as, read_object

_VALIDATION_KEYS = (("data", "val"), ("evaluation", "batches"), ("evaluation", "batch"))
"""Recipe keys that decide which samples an evaluation uses."""
METADATA: Rule = {
    "recipe": {
        "model": {"use": TEXT},
        "data": {},
        "schedule": {"warmup": ANYTHING},
        "evaluation": {},
        "checkpoint": {"keep_every": ANYTHING},
    },
    "plan": {
        "threads": NATURAL,
        "precision": Kind(" or ".join(get_args(PrecisionName)), lambda value: value in get_args(PrecisionName)),
        "warmup": AMOUNT,
        "keep_every": Maybe(NATURAL),
        "extent": {"seconds": Maybe(AMOUNT)},
        "batch": {"size": NATURAL},
        "spent?": {"*": NATURAL},
        "settled?": Maybe({}),
        "evaluate_batches?": Maybe(NATURAL),
        "swa?": Maybe({"start": NATURAL, "every": NATURAL, "anneal": NATURAL}),
    },
    "provenance": {"objects?": {"function": Maybe(TEXT)}},
}
"""The fields of the earlier part's metadata that are read. They are checked, because any version may have written them.
"""


@dataclass(frozen=True)
class Earlier:
    """The earlier part of a run: its checkpoint, measurements and choices.

    Attributes:
        lock: The lock on the folder. Ranks other than the first have none, and change nothing in the folder.
        checkpoint: The checkpoint; None if the run ended before its first save. The run then starts at step 0 with the
            same choices.
        run_metadata: Recipe, plan and provenance of the earlier part.
        accept: Recipe paths of accepted differences.
        again: Returns the command that accepts given differences.
        messages: What the user must know, for the output before the first step.
    """

    folder: RunFolder
    lock: RunLock | NoLock
    checkpoint: Path | None
    run_metadata: Mapping[str, Any]
    accept: tuple[str, ...]
    again: CommandWith
    messages: list[str] = field(default_factory=list)

    @property
    def threads(self) -> int:
        """Number of CPU threads. It is measured once per run, because another number changes the last bits of sums."""
        return int(self.run_metadata["plan"]["threads"])

    @property
    def resolved(self) -> Mapping[str, Any]:
        """Settings that the recipe left open and that were decided before the model was built."""
        kept: Mapping[str, Any] = self.run_metadata["plan"].get("settled", {})
        return kept

    @cached_property
    def used(self) -> Usage:
        """Time and energy of the earlier processes; UNUSED if a copy of the run has no log."""
        return read_usage(self.folder.log) if self.folder.log.is_file() else UNUSED

    def describe(self, step: int) -> str:
        """Return one line about where the run continues."""
        if self.checkpoint is None:
            return f"{self.folder.path} has no checkpoint: the run starts at step 0 with its original plan"
        return f"resumed from {self.checkpoint} at step {step}"

    def precision(self, requested: str | None, facts: RunFacts) -> PrecisionName:
        """Return the precision of the run. ``auto`` is the precision that was chosen when the run began."""
        if requested == "auto":
            return cast(PrecisionName, self.run_metadata["plan"]["precision"])
        return choose_precision(requested, facts.device, facts.low_precision, {})[0]

    def kept_from_plan(self, recipe: Recipe, facts: RunFacts, ranks: int = 1) -> ResumedValues:
        """Return values of the first plan that are kept unless the recipe has changed them.

        Such a value is a fraction of the run (warm-up, ``keep_every``) or describes progress. Recomputed for a longer
        run, it would differ from the value that the earlier part has used.
        """
        then, now, before = self.run_metadata["plan"], recipe.model_dump(mode="json"), self.run_metadata["recipe"]
        batch = batch_of(recipe.batch, facts.own_batches, ranks=ranks)
        return ResumedValues(
            self._warmup(recipe) if now["schedule"]["warmup"] == before["schedule"]["warmup"] else None,
            then["keep_every"] if now["checkpoint"]["keep_every"] == before["checkpoint"]["keep_every"] else None,
            Spent(**then.get("spent", {})) if batch.size == then["batch"]["size"] else _spent(self.checkpoint),
            then.get("evaluate_batches", 0) if _has_same_validation(before, now) else None,
            SwaPlan(**then["swa"]) if then.get("swa") and before["model"].get("swa") == now["model"]["swa"] else None,
        )

    def _warmup(self, recipe: Recipe) -> int | float | None:
        """Return a warm-up of the same length: the same number of steps, or the same seconds as a fraction of the new
        total.
        """
        warmup: int | float = self.run_metadata["plan"]["warmup"]
        if isinstance(warmup, int):
            return warmup
        total_s = self.run_metadata["plan"]["extent"]["seconds"]
        return warmup * (total_s / recipe.until.value) if recipe.until.unit == "s" else None

    def load(self, state: TrainState, recipe: Recipe, precision: str, now: Mapping[str, Any]) -> list[str]:
        """Load the checkpoint into ``state`` and return the paths of the accepted differences.

        Adds every difference between the earlier part and this process to ``messages``. ``now`` is the provenance of
        this process. Different training data start a new epoch and clear the quarantine. Raises UsageError for a
        difference that changes the mathematics and is not accepted.
        """
        changes = self._changes(state, recipe, precision, now)
        accept = [each for each in self.accept if each != CRASH_LOOP]
        also = [CRASH_LOOP] if CRASH_LOOP in self.accept else []
        accepted = require_accepted(changes, accept, command=lambda paths, undo=(): self.again([*also, *paths], undo))
        for change in changes:
            self.messages.append(str(change))
        if self.checkpoint is not None:
            load_checkpoint(state, self.checkpoint, verified=True)
        if state.micro_limit and any(change.path.startswith("batch.") for change in changes):
            state.micro_limit = None  # the micro-batch size of the new recipe is tried first
        if self.checkpoint is not None and not isinstance(self.lock, NoLock):
            for path in set_aside_newer(self.folder.checkpoints, self.checkpoint, identity_of(self.folder)):
                self.messages.append(f"set aside: {path}")
        if any(change.path.startswith("data.train") for change in accepted):
            state.data, state.quarantine = Cursor(state.data.epoch + 1, 0), set()
        return [change.path for change in accepted]

    def _changes(self, state: TrainState, recipe: Recipe, precision: str, now: Mapping[str, Any]) -> list[Change]:
        then = {
            **self.run_metadata,
            "recipe": {**self.run_metadata["recipe"], "precision": self.run_metadata["plan"]["precision"]},
        }
        requested = {"recipe": {**masked(recipe.model_dump(mode="json")), "precision": precision}, "provenance": now}
        if self.checkpoint is None:
            return compare(then, requested, step=0, mismatches=[])
        found = mismatches(state, self.checkpoint)
        with raising_checkpoint_error(self.checkpoint):  # the stored recipe or provenance may be invalid
            return compare(then, requested, step=step_of(self.checkpoint) or 0, mismatches=found)


def _has_same_validation(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(before[part].get(key) == now[part].get(key) for part, key in _VALIDATION_KEYS)


def _spent(checkpoint: Path | None) -> Spent:
    if checkpoint is None:
        return Spent()
    with raising_checkpoint_error(checkpoint):
        rest = read_state(checkpoint)["rest"]
        counters, data = rest["counters"], rest["data"]
        return Spent(counters["step"], counters["num_samples"], counters["num_tokens"], data["epoch"], data["position"])


def folder_of(run: str | Path, say: Callable[[str], object] = print) -> RunFolder:
    """Return the folder of a run. If a URL names it, its copy is fetched into ``runs`` first."""
    return RunFolder.open(fetch_run(str(run), Path("runs"), say) if "://" in str(run) else run)


def find_earlier(folder: RunFolder, lock: RunLock, accept: Sequence[str]) -> Earlier:
    """Return the earlier part of a run at its newest intact checkpoint. Reports each newer checkpoint that is damaged.

    A run without checkpoints starts at step 0. Raises CheckpointError if all of its checkpoints are damaged, UsageError
    if the run dies in the same step repeatedly.
    """
    path, broken = newest_valid(folder.checkpoints, _require_resumable, identity_of(folder))
    if path is None and (broken or not _has_metadata(folder)):
        lines = [*broken, f"{folder.path} has no checkpoint that verifies"]
        raise CheckpointError("\n".join(lines), remedy=f"start it again from step 0: {restart_command(folder)}")
    found = _earlier_at(folder, lock, path, accept, [f"checkpoint skipped: {message}" for message in broken])
    require_no_crash_loop(folder, lock, path, accept, found.again)
    return found


def follow_earlier(folder: RunFolder, checkpoint: Path | None, accept: Sequence[str]) -> Earlier:
    """Return, on another rank, the earlier part that the first rank has found. Reports nothing."""
    return _earlier_at(folder, NoLock(), checkpoint, accept, [])


def _earlier_at(
    folder: RunFolder,
    lock: RunLock | NoLock,
    checkpoint: Path | None,
    accept: Sequence[str],
    messages: list[str],
) -> Earlier:
    metadata = _metadata_of_folder(folder) if checkpoint is None else read_run_metadata(checkpoint)
    live = is_live(str(metadata["recipe"]["model"]["use"]))
    is_made_by_function = bool(metadata["provenance"].get("objects", {}).get("function"))
    call = python_command(folder) if live and not is_made_by_function else on_command_line(this_command(folder))
    return Earlier(folder, lock, checkpoint, metadata, tuple(accept), call, messages)


def interrupted_run(root: Path, name: str, launch: Launch) -> RunFolder | None:
    """Return the newest run of that name that the same call of the same launch began; None if there is none."""
    for folder in _newest_runs(root, name):
        with suppress(UnreadableFile):
            made_by = read_as(folder.provenance, ProvenanceFile).launch
            if made_by and (made_by.job, made_by.call) == (launch.job, launch.call):
                return folder
    return None


def unfinished_before(new: RunFolder, name: str) -> Iterator[str]:
    """Yield a line with the command that resumes the newest other run of that name, if it was stopped or killed."""
    before = next((each for each in _newest_runs(new.path.parent, name) if each.path != new.path), None)
    if before is None:
        return
    with suppress(UsageError, StorageError, UnreadableFile):  # a log that is missing or cannot be read
        state = state_of(before.path, read_end(before.log))
        if state in ("stopped", KILLED):
            command = resume_command(before)
            yield f"{before.path} was {state}; {new.path} is a new run. To continue the earlier one: {command}"


def _newest_runs(root: Path, name: str) -> list[RunFolder]:
    """Return the runs of a name that have begun, the newest first."""
    folders = [path for path in root.glob(f"{name}*") if re.fullmatch(rf"{re.escape(name)}(-\d+)?", path.name)]
    begun = [path for path in folders if (path / "provenance.json").is_file()]
    begun.sort(key=lambda path: (path / "provenance.json").stat().st_mtime_ns, reverse=True)
    return [RunFolder(path) for path in begun]


def _require_resumable(checkpoint: Path) -> None:
    require_whole(checkpoint)
    for problem in violations(read_run_metadata(checkpoint), METADATA, "state.json: metadata"):
        raise invalid_content(checkpoint, problem)


def _has_metadata(folder: RunFolder) -> bool:
    return all(file.is_file() for file in (folder.recipe, folder.plan, folder.provenance))


def _metadata_of_folder(folder: RunFolder) -> dict[str, Any]:
    recipe = load(folder.recipe, environ={}).recipe.model_dump(mode="json")
    try:
        plan = read_object(folder.plan, PlanFile)
        provenance = read_object(folder.provenance, ProvenanceFile)
    except UnreadableFile as error:
        raise CheckpointError(error.message, remedy=f"start it again from step 0: {restart_command(folder)}") from None
    metadata = {"recipe": recipe, "plan": plan, "provenance": provenance}
    for problem in violations(metadata, METADATA, str(folder.path)):
        raise CheckpointError(
            f"no run wrote this: {problem}", remedy=f"start it again from step 0: {restart_command(folder)}"
        )
    return metadata


def resume_command(folder: RunFolder, *, live: bool = False) -> str:
    """Return the command that resumes a run, or that starts it from step 0 if nothing can be resumed."""
    if live:
        return f"tw.fit(..., resume={str(folder.path)!r})"
    if _has_metadata(folder) or (folder.checkpoints.is_dir() and checkpoints(folder.checkpoints, identity_of(folder))):
        return f"{program_name()} resume {shlex.quote(str(folder.path))}"
    return restart_command(folder)


def restart_command(folder: RunFolder) -> str:
    """Return the command that trains the recipe of a run from step 0, in another folder."""
    return f"{program_name()} train {shlex.quote(str(folder.recipe))}"


def doubled_length(until: Duration, *, live: bool = False) -> str:
    """Return the setting that doubles the length of a run; with ``live`` the argument of ``tw.fit``."""
    doubled = Duration(min(until.value * 2, 2.0**53), until.unit)
    argument = {"ep": "epochs", "steps": "steps"}.get(until.unit)
    if not live:
        return f"--set until={doubled}"
    return f"{argument}={doubled.value:.15g}" if argument else f"until={str(doubled)!r}"


def python_command(folder: RunFolder) -> CommandWith:
    """Return the CommandWith for a run of live objects, which only Python can resume.

    It accepts nothing if a fatal change must be undone: defaults that follow from that change, too, are then as before.
    """

    def command_with(paths: Sequence[str], undo: Sequence[str] = (), /) -> str:
        accept = f", accept={list(paths)}" if paths and not undo else ""
        return f"tw.fit(..., resume={str(folder.path)!r}{accept})"

    return command_with


def this_command(folder: RunFolder) -> str:
    """Return this command line if it is a ``resume``, else the command that resumes the run."""
    return (
        f"{program_name()} {shlex.join(masked(sys.argv[1:]))}"
        if sys.argv[1:2] == ["resume"]
        else resume_command(folder)
    )


def program_name() -> str:
    """Return how the user called this program, so that a printed command can be pasted: a path unless on PATH."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m trainwright"
    if script.name != "trainwright" or shutil.which("trainwright") == str(script.absolute()):
        return "trainwright"
    return shlex.quote(str(script))
