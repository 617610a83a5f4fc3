"""The Optuna studies of a sweep: one in memory for sampling and pruning, and one in a journal file for the results.

The journal has one line for each trial that has ended. The study in memory is rebuilt from the journal. Parameters and
pruning are a function of the seed, the number of the trial and the results of the trials that had ended before, so a
kill at any instant changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from trainwright.commands.sweep.spec import Scalar, Sweep, grid_points, label_of
from trainwright.errors import StorageError
from trainwright.runs.files import UnreadableFile
from trainwright.runs.folder import RunFolder
from trainwright.runs.json_values import JsonValue
from trainwright.runs.shapes import PlanFile, read_as
from trainwright.runs.storage import write_atomically

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

JOURNAL = "journal.log"
IN_MEMORY = "sweep"
"""The name of the study in memory. Hyperband assigns trials to brackets by it, so it is the same for all sweeps."""
INDEX = "trial"
"""User attribute of a trial in the journal: its number in the sweep."""
END = "end"
"""User attribute of a trial in the journal: the other cells of its row."""
STARTUP_TRIALS = 5
"""Number of first trials that the median pruner does not prune."""
REDUCTION = 3
"""Hyperband promotes about one trial out of this number."""


@dataclass(frozen=True)
class TrialRow:
    """One trial in the table of a sweep.

    ``ended`` is finished, pruned, diverged, failed, or stopped (can be resumed). ``value`` is None without a finite
    value. ``steps`` of a pruned trial is the step at which it was pruned.
    """

    trial: int
    params: Mapping[str, object]
    value: float | None
    steps: int
    seconds: float
    ended: str
    findings: tuple[str, ...] = ()
    reason: str = ""
    folder: str = ""


@dataclass
class Unfinished:
    """A trial that has not ended: its number, its parameters, and Optuna's handle to report its values to."""

    number: int
    params: Mapping[str, object]
    handle: OptunaTrial
    values: dict[int, float] = field(default_factory=dict)
    pruned_at: int | None = None


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna, which reports each study and each experimental pruner. A sweep has its own output."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            yield
    finally:
        logging.set_verbosity(before)


class StudyTrials:
    """The trials of a sweep: ended ones from the journal, and unfinished ones."""

    def __init__(self, sweep: Sweep) -> None:
        import optuna

        self._sweep, self._path = sweep, sweep.folder / JOURNAL
        self._distributions = {each.path: each.distribution() for each in sweep.space}
        self._grid = grid_points(sweep.space) if sweep.sampler == "grid" else []
        self._journal = _open_journal(self._path, sweep)
        self._study = optuna.create_study(study_name=IN_MEMORY, direction=_direction(sweep))
        self._pruner: BasePruner | None = None
        self.ended: dict[int, FrozenTrial] = {
            int(each.user_attrs[INDEX]): each for each in self._journal.get_trials(deepcopy=False)
        }
        self.unfinished: dict[int, Unfinished] = {}
        self.count = 0
        """Number of trials that the study in memory has."""

    def load(self, last: int) -> None:
        """Add the trials up to ``last``. Those that have ended are read from the journal."""
        for number in range(self.count, last + 1):
            if number in self.ended:
                self._study.add_trial(self.ended[number])
                self.count += 1
            else:
                self.ask()

    @property
    def num_started(self) -> int:
        """Return the number of trials whose parameters were chosen, here or before."""
        saved = [int(path.stem.rpartition("-")[2]) for path in (self._sweep.folder / "trials").glob("trial-*.json")]
        return max([-1, *saved, *self.ended]) + 1

    def ask(self) -> Unfinished:
        """Choose the parameters of the next trial, and write them to a file before it starts."""
        number, saved = self.count, trial_folder(self._sweep, self.count).with_suffix(".json")
        labels = _read_labels(saved)
        if labels is None and self._grid:
            point = self._grid[number]
            labels = {each.path: label_of(value) for each, value in zip(self._sweep.space, point, strict=True)}
        if labels is not None:
            self._study.enqueue_trial(labels)
        self._study.sampler = _sampler(self._sweep, number)
        handle = self._study.ask(self._distributions)
        self.count += 1
        labels = {path: cast(Scalar, handle.params[path]) for path in self._distributions}
        if not saved.exists():
            saved.parent.mkdir(exist_ok=True)
            write_atomically(saved, json.dumps(labels) + "\n")
        params = {each.path: each.value_of(labels[each.path]) for each in self._sweep.space}
        self.unfinished[number] = Unfinished(number, params, handle)
        return self.unfinished[number]

    def report(self, trial: Unfinished, step: int, value: float) -> bool:
        """Report a value at a step. Returns True if the trial is pruned there; further values do not count then."""
        if trial.pruned_at is not None:
            return True
        if self._pruner is None:
            self._pruner = self._study.pruner = _pruner(self._sweep, _planned_steps(self._sweep))
        trial.values[step] = value
        trial.handle.report(value, step)
        if trial.handle.should_prune():
            trial.pruned_at = step
        return trial.pruned_at is not None

    def finish(self, trial: Unfinished, row: TrialRow) -> None:
        """Write the result of a trial as one line of the journal, and add it to the study in memory."""
        from optuna.trial import TrialState

        end = {"steps": row.steps, "seconds": row.seconds, "ended": row.ended, "findings": list(row.findings)}
        end |= {"reason": row.reason, "folder": row.folder}
        trial.handle.set_user_attr(INDEX, trial.number)
        trial.handle.set_user_attr(END, cast(JsonValue, end))
        if row.ended == "failed":
            self._study.tell(trial.handle, state=TrialState.FAIL)
        elif row.ended == "pruned":
            self._study.tell(trial.handle, state=TrialState.PRUNED)
        else:
            self._study.tell(trial.handle, _for_optuna(row.value, self._sweep))
        frozen = self._study.get_trials(deepcopy=False)[trial.handle.number]
        try:
            self._journal.add_trial(frozen)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error}", remedy="make room, and run it again") from None
        self.ended[trial.number] = frozen
        del self.unfinished[trial.number]

    def rows(self) -> list[TrialRow]:
        """Return the trials that have ended, by number."""
        return [row_of(self._sweep, number, self.ended[number]) for number in sorted(self.ended)]

    def importance(self) -> dict[str, float]:
        """Return the importance of each parameter (PED-ANOVA); empty for fewer than 2 parameters or 4 values."""
        import optuna

        values = {each.value for each in self.ended.values() if each.state.name == "COMPLETE"}
        if len(self._sweep.space) < 2 or len([each for each in values if each is not None and math.isfinite(each)]) < 4:
            return {}
        try:
            return dict(optuna.importance.get_param_importances(self._journal))
        except (ValueError, RuntimeError):  # a parameter with one value only, or all values equal
            return {}


def trial_folder(sweep: Sweep, number: int) -> Path:
    """Return the run folder of a trial."""
    return sweep.folder / "trials" / f"trial-{number:03}"


def row_of(sweep: Sweep, number: int, frozen: FrozenTrial) -> TrialRow:
    """Return the row of a trial that has ended."""
    end = frozen.user_attrs[END]
    params = {each.path: each.value_of(frozen.params[each.path]) for each in sweep.space}
    return TrialRow(
        number,
        params,
        frozen.value if frozen.value is not None and math.isfinite(frozen.value) else None,
        end["steps"],
        end["seconds"],
        end["ended"],
        tuple(end["findings"]),
        end["reason"],
        end["folder"],
    )


def _for_optuna(value: float | None, sweep: Sweep) -> float:
    """Return a value for Optuna. A non-finite one is the worst, since the sampler learns nothing from a failure."""
    if value is not None and math.isfinite(value):
        return value
    return math.inf if sweep.mode == "min" else -math.inf


def _direction(sweep: Sweep) -> Literal["minimize", "maximize"]:
    return "minimize" if sweep.mode == "min" else "maximize"


def _sampler(sweep: Sweep, number: int) -> BaseSampler:
    """Return a new sampler for a trial, seeded by the seed of the sweep and the number of the trial only."""
    import optuna

    digest = hashlib.sha256(f"{sweep.seed}/{number}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")
    if sweep.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.RandomSampler(seed=seed)


def _planned_steps(sweep: Sweep) -> int | None:
    """Return the length of the first trial in steps, from its plan."""
    try:
        extent = read_as(RunFolder(trial_folder(sweep, 0)).plan, PlanFile).extent
    except UnreadableFile:
        return None
    return extent.steps if extent else None


def _pruner(sweep: Sweep, max_steps: int | None) -> BasePruner:
    import optuna

    if sweep.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS)
    if sweep.pruner == "hyperband":
        most = max_steps or "auto"
        least = max(1, max_steps // REDUCTION**3) if max_steps else 1
        return optuna.pruners.HyperbandPruner(least, most, REDUCTION)
    return optuna.pruners.NopPruner()


def _open_journal(path: Path, sweep: Sweep) -> Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    try:
        backend, lock = JournalFileBackend(str(path)), JournalFileSymlinkLock(str(path))
        lock.acquire()
        try:
            _cut_torn_line(path)
        finally:
            lock.release()
        return optuna.create_study(
            storage=JournalStorage(backend), study_name=sweep.name, direction=_direction(sweep), load_if_exists=True
        )
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error}", remedy="choose another --folder") from None


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without its newline, which a kill may have left: Optuna cannot read what follows it."""
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
            os.fsync(file.fileno())


def _read_labels(path: Path) -> dict[str, Scalar] | None:
    try:
        return cast(dict[str, Scalar], json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except ValueError:
        raise StorageError(f"{path} is damaged", remedy="restore it, or start the sweep again with --name") from None
