"""Going on with a run: its newest checkpoint that verifies, what is different by now, and what of that is wanted."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from trainwright.build.assemble import LIVE
from trainwright.engine.precision import PrecisionName
from trainwright.errors import CheckpointError
from trainwright.plan.changes import Again, Change, compare, on_command_line, require_accepted
from trainwright.plan.make import Facts, Plan, choose_precision
from trainwright.recipe import Recipe
from trainwright.runlog.deaths import CRASH_LOOP, require_no_crash_loop
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.lock import RunLock
from trainwright.state.checkpoint import load_checkpoint, misfits, read_papers
from trainwright.state.cursor import Cursor
from trainwright.state.manifest import step_of
from trainwright.state.store import checkpoints, newest_valid
from trainwright.state.train_state import TrainState


@dataclass(frozen=True)
class Earlier:
    """The part of a run that was trained before: its checkpoint, and what it measured and chose."""

    folder: RunFolder
    lock: RunLock
    checkpoint: Path
    papers: Mapping[str, Any]
    accept: tuple[str, ...]
    say: Callable[[str], None]
    again: Again

    @property
    def threads(self) -> int:
        """CPU threads are measured once in a run: with another number sums have other last bits."""
        return int(self.papers["plan"]["threads"])

    def precision(self, asked: str, facts: Facts) -> PrecisionName:
        """``auto`` means what it was found to mean when the run began."""
        if asked == "auto":
            return cast(PrecisionName, self.papers["plan"]["precision"])
        return choose_precision(asked, facts.device, facts.low_precision, {})[0]

    def with_its_warmup(self, plan: Plan, recipe: Recipe) -> Plan:
        """A longer run keeps the warm-up that it had: a share of the whole would stretch over steps that are done."""
        then, schedule = self.papers["plan"], recipe.model_dump(mode="json")["schedule"]
        if schedule["warmup"] != self.papers["recipe"]["schedule"]["warmup"]:
            return plan
        if then["extent"]["steps"] and plan.extent.steps:
            return replace(plan, warmup=then["warmup"])
        if then["extent"]["seconds"] and plan.extent.seconds:
            return replace(plan, warmup=then["warmup"] * then["extent"]["seconds"] / plan.extent.seconds)
        return plan

    def load(self, state: TrainState, recipe: Recipe, precision: str, now: Mapping[str, Any]) -> list[str]:
        """Puts the checkpoint into ``state``; returns the differences that were accepted.

        Tells what is different by ``now``, the provenance. Raises UsageError unless all that changes the maths is
        accepted. Other training data begin with an epoch of their own and no quarantine.
        """
        changes = self._changes(state, recipe, precision, now)
        accept = [each for each in self.accept if each != CRASH_LOOP]
        also = [CRASH_LOOP] if CRASH_LOOP in self.accept else []
        accepted = require_accepted(changes, accept, again=lambda paths: self.again([*also, *paths]))
        for change in changes:
            self.say(str(change))
        load_checkpoint(state, self.checkpoint, verified=True)
        if any(change.path.startswith("data.train") for change in accepted):
            state.data, state.quarantine = Cursor(state.data.epoch + 1, 0), set()
        return [change.path for change in accepted]

    def _changes(self, state: TrainState, recipe: Recipe, precision: str, now: Mapping[str, Any]) -> list[Change]:
        then = {**self.papers, "recipe": {**self.papers["recipe"], "precision": self.papers["plan"]["precision"]}}
        asked = {"recipe": {**recipe.model_dump(mode="json"), "precision": precision}, "provenance": now}
        return compare(then, asked, step=step_of(self.checkpoint) or 0, misfits=misfits(state, self.checkpoint))


def find_earlier(folder: RunFolder, lock: RunLock, accept: Sequence[str], say: Callable[[str], None]) -> Earlier:
    """The newest checkpoint that verifies; says which newer ones do not, and what is wrong with each.

    Raises CheckpointError when there is none, UsageError when the run died in the same step twice.
    """
    path, broken = newest_valid(folder.checkpoints)
    for message in broken:
        say(f"stepped over: {message}")
    if path is None:
        anew = f"start it anew: {program()} train {shlex.quote(str(folder.recipe))}"
        raise CheckpointError("\n".join([*broken, f"{folder.path} has no checkpoint that verifies"]), remedy=anew)
    papers = read_papers(path)
    live = str(papers["recipe"]["model"]["use"]).startswith(f"{LIVE}:")
    call = in_python(folder) if live else on_command_line(called(folder))
    require_no_crash_loop(folder, lock, path, accept, call)
    return Earlier(folder, lock, path, papers, tuple(accept), say, call)


def again(folder: RunFolder, *, live: bool = False) -> str:
    """What to call to go on with a run, or to begin it anew where nothing could be saved."""
    if live:
        return f"tw.fit(..., resume={str(folder.path)!r})"
    if folder.checkpoints.is_dir() and checkpoints(folder.checkpoints):
        return f"{program()} resume {shlex.quote(str(folder.path))}"
    return f"{program()} train {shlex.quote(str(folder.recipe))}"


def in_python(folder: RunFolder) -> Again:
    """The Again of a run of live objects."""
    return lambda paths: f"tw.fit(..., resume={str(folder.path)!r}, accept={list(paths)})"


def called(folder: RunFolder) -> str:
    """This very command less what it accepts; ``again`` where it was not called from a command line."""
    if sys.argv[1:2] != ["resume"]:
        return again(folder)
    words = iter(sys.argv[1:])
    kept = [word for word in words if not word.startswith("--accept=") and (word != "--accept" or not next(words, ""))]
    return f"{program()} {shlex.join(kept)}"


def program() -> str:
    """How this command line was called, so that what is printed can be pasted: a path unless it is on PATH."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m trainwright"
    if called.name != "trainwright" or shutil.which("trainwright") == str(called.absolute()):
        return "trainwright"
    return shlex.quote(str(called))
