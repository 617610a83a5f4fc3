"""Going on with a run: its newest checkpoint that verifies, what is different by now, and what of that is wanted."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trainwright.build.assemble import LIVE
from trainwright.engine.precision import PrecisionName
from trainwright.errors import CheckpointError
from trainwright.plan.batch import solve_batch
from trainwright.plan.make import Kept, RunFacts, Spent, choose_precision
from trainwright.plan.resume_changes import Change, CommandWith, compare, on_command_line, require_accepted
from trainwright.recipe import Recipe
from trainwright.runlog.deaths import CRASH_LOOP, require_no_crash_loop
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.lock import RunLock
from trainwright.state.checkpoint import load_checkpoint, misfits, read_run_metadata
from trainwright.state.cursor import Cursor
from trainwright.state.manifest import raising_checkpoint_error, step_of
from trainwright.state.store import checkpoints, newest_valid, set_aside_newer
from trainwright.state.train_state import TrainState


@dataclass(frozen=True)
class Earlier:
    """The part of a run that was trained before: its checkpoint, and what it measured and chose."""

    folder: RunFolder
    lock: RunLock
    checkpoint: Path
    run_metadata: Mapping[str, Any]
    accept: tuple[str, ...]
    say: Callable[[str], None]
    again: CommandWith

    @property
    def threads(self) -> int:
        """CPU threads are measured once in a run: with another number sums have other last bits."""
        return int(self.run_metadata["plan"]["threads"])

    @property
    def settled(self) -> Mapping[str, Any]:
        """What was decided before the model was built, where the recipe left it to the plan."""
        kept: Mapping[str, Any] = self.run_metadata["plan"].get("settled", {})
        return kept

    def precision(self, asked: str, facts: RunFacts) -> PrecisionName:
        """``auto`` means what it was found to mean when the run began."""
        if asked == "auto":
            return cast(PrecisionName, self.run_metadata["plan"]["precision"])
        return choose_precision(asked, facts.device, facts.low_precision, {})[0]

    def what_was_planned(self, recipe: Recipe) -> Kept:
        """What the recipe asks for as before and is done in part: as a share of another whole it would be another."""
        then, asked, before = self.run_metadata["plan"], recipe.model_dump(mode="json"), self.run_metadata["recipe"]
        batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
        return Kept(
            self._warmup(recipe) if asked["schedule"]["warmup"] == before["schedule"]["warmup"] else None,
            then["keep_every"] if asked["checkpoint"]["keep_every"] == before["checkpoint"]["keep_every"] else None,
            Spent(**then.get("spent", {})) if batch.size == then["batch"]["size"] else _spent(self.checkpoint),
        )

    def _warmup(self, recipe: Recipe) -> int | float | None:
        """Of the same length: steps as they are, and a share of so many seconds as a share of those that it is now."""
        warmup: int | float = self.run_metadata["plan"]["warmup"]
        if isinstance(warmup, int):
            return warmup
        was_s = self.run_metadata["plan"]["extent"]["seconds"]
        return warmup * (was_s / recipe.until.value) if recipe.until.unit == "s" else None

    def load(self, state: TrainState, recipe: Recipe, precision: str, now: Mapping[str, Any]) -> list[str]:
        """Puts the checkpoint into ``state``; returns the differences that were accepted.

        Tells what is different by ``now``, the provenance. Raises UsageError unless all that changes the maths is
        accepted. Other training data begin with an epoch of their own and no quarantine.
        """
        changes = self._changes(state, recipe, precision, now)
        accept = [each for each in self.accept if each != CRASH_LOOP]
        also = [CRASH_LOOP] if CRASH_LOOP in self.accept else []
        accepted = require_accepted(changes, accept, command=lambda paths, undo=(): self.again([*also, *paths], undo))
        for change in changes:
            self.say(str(change))
        load_checkpoint(state, self.checkpoint, verified=True)
        if state.micro_limit and any(change.path.startswith("batch.") for change in changes):
            state.micro_limit = None  # another micro-batch was asked for: it is tried as it is
        for path in set_aside_newer(self.folder.checkpoints, self.checkpoint):
            self.say(f"set aside: {path}")
        if any(change.path.startswith("data.train") for change in accepted):
            state.data, state.quarantine = Cursor(state.data.epoch + 1, 0), set()
        return [change.path for change in accepted]

    def _changes(self, state: TrainState, recipe: Recipe, precision: str, now: Mapping[str, Any]) -> list[Change]:
        then = {
            **self.run_metadata,
            "recipe": {**self.run_metadata["recipe"], "precision": self.run_metadata["plan"]["precision"]},
        }
        asked = {"recipe": {**recipe.model_dump(mode="json"), "precision": precision}, "provenance": now}
        return compare(then, asked, step=step_of(self.checkpoint) or 0, misfits=misfits(state, self.checkpoint))


def _spent(checkpoint: Path) -> Spent:
    with raising_checkpoint_error(checkpoint):
        rest = json.loads((checkpoint / "state.json").read_text())["rest"]
        counters, data = rest["counters"], rest["data"]
        return Spent(counters["step"], counters["num_samples"], counters["num_tokens"], data["epoch"], data["position"])


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
    metadata = read_run_metadata(path)
    live = str(metadata["recipe"]["model"]["use"]).startswith(f"{LIVE}:")
    call = in_python(folder) if live else on_command_line(called(folder))
    require_no_crash_loop(folder, lock, path, accept, call)
    return Earlier(folder, lock, path, metadata, tuple(accept), say, call)


def again(folder: RunFolder, *, live: bool = False) -> str:
    """What to call to go on with a run, or to begin it anew where nothing could be saved."""
    if live:
        return f"tw.fit(..., resume={str(folder.path)!r})"
    if folder.checkpoints.is_dir() and checkpoints(folder.checkpoints):
        return f"{program()} resume {shlex.quote(str(folder.path))}"
    return f"{program()} train {shlex.quote(str(folder.recipe))}"


def in_python(folder: RunFolder) -> CommandWith:
    """The CommandWith of a run of live objects."""
    return lambda paths, undo=(): f"tw.fit(..., resume={str(folder.path)!r}, accept={list(paths)})"


def called(folder: RunFolder) -> str:
    """This very command; ``again`` where it was not called from a command line."""
    return f"{program()} {shlex.join(sys.argv[1:])}" if sys.argv[1:2] == ["resume"] else again(folder)


def program() -> str:
    """How this command line was called, so that what is printed can be pasted: a path unless it is on PATH."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m trainwright"
    if called.name != "trainwright" or shutil.which("trainwright") == str(called.absolute()):
        return "trainwright"
    return shlex.quote(str(called))
