"""``verify resume``: proves that an interrupted and resumed run has the same bits as an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainwright.checkpoint.examination import CheckpointDifference, differences, examine
from trainwright.checkpoint.manifest import name_of
from trainwright.commands.verify.trial import OTHER_DISK, STEP_S, TrialPart, outcome_of
from trainwright.errors import StorageError, TrainwrightError, UsageError
from trainwright.monitoring.terminal import Console
from trainwright.recipe import Recipe
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read
from trainwright.runs.records import Evaluated, Record, Started, Step
from trainwright.runs.shapes import PlanFile, read_as
from trainwright.training.subject import Build, named
from trainwright.trials.trial import require_signals


@dataclass(frozen=True)
class ResumeTrial:
    """One trial: 2N steps straight; and N steps, an end, then N more steps with another number of workers.

    ``recipe`` is the path of a recipe, or ``module:function`` that makes the objects.
    """

    recipe: Path
    steps: int = 6
    workers: int = 2
    then_workers: int = 3
    settings: tuple[str, ...] = ()
    kill: bool = True


@dataclass(frozen=True)
class Proof:
    """The result of a trial. It compares the log up to the step ``upto``, and the checkpoint of that step.

    The ``cause`` of a difference is "recipe" if two straight runs differ too, else "resume".
    """

    trial: ResumeTrial
    precision: str
    tensors: int
    samples: int
    seconds: float
    upto: int = 0
    log: str | None = None
    checkpoint: tuple[CheckpointDifference, ...] = ()
    cause: str | None = None
    folder: Path | None = None

    @property
    def equal(self) -> bool:
        return self.log is None and not self.checkpoint

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def lines(self) -> list[str]:
        trial, n = self.trial, self.trial.steps
        runs = f"{2 * n} steps straight and {n} + {'SIGKILL' if trial.kill else 'stop'} + {n}"
        settings = f"workers {trial.workers} -> {trial.then_workers}; {self.precision}"
        kept = [f"kept: {self.folder}"] if self.folder else []
        if self.equal:
            return [
                f"{runs}: {self.tensors} tensors, {2 * n} losses, {self.samples} sample ids equal; {settings}",
                *kept,
            ]
        lines = [f"NOT the same bits: {runs}; {settings}"]
        lines += [f"log: {self.log}"] if self.log else ["log: no step differs"]
        if self.checkpoint:
            first = ", ".join(map(str, self.checkpoint[:4]))
            more = f" and {len(self.checkpoint) - 4} more" if len(self.checkpoint) > 4 else ""
            lines.append(f"checkpoint of step {self.upto}: {first}{more}")
        return [*lines, f"cause: {_CAUSES[self.cause or '']}", *kept]

    def to_json(self) -> dict[str, object]:
        trial = self.trial
        return {
            "equal": self.equal,
            "recipe": str(trial.recipe),
            "steps": trial.steps,
            "workers": [trial.workers, trial.then_workers],
            "precision": self.precision,
            "killed": trial.kill,
            "tensors": self.tensors,
            "samples": self.samples,
            "upto": self.upto,
            "log": self.log,
            "checkpoint": [asdict(each) for each in self.checkpoint],
            "cause": self.cause,
            "folder": str(self.folder) if self.folder else None,
            "seconds": round(self.seconds, 3),
        }


_CAUSES = {
    "recipe": "the recipe itself is not deterministic: two runs from the start differ as well\n"
    "  remedy: draw random numbers from torch, NumPy or random only, which are seeded; set deterministic: true",
    "resume": "the resume: two straight runs are the same bits\n"
    "  remedy: check for state of model, optimizer, loss or dataset that is not in the checkpoint, and for data that\n"
    "  depend on the number of workers (try equal --workers and --then-workers)",
}


RunPart: TypeAlias = Callable[[TrialPart, Path, Mapping[str, str]], int]
"""Runs a part with its output in a file and with further environment variables. Returns the exit code."""


def in_new_python(part: TrialPart, output: Path, environment: Mapping[str, str]) -> int:
    """Run a part in a new Python process, as the command line does."""
    command = [sys.executable, "-m", "trainwright.commands.verify.trial", json.dumps(asdict(part))]
    with output.open("w") as file:  # no pipe: workers that outlive a kill would hold it open
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **environment}, check=False
        ).returncode


def in_this_process(build: Build) -> RunPart:
    """Return a RunPart for objects, which no other process can make. It cannot be killed."""

    def run_part(part: TrialPart, output: Path, environment: Mapping[str, str]) -> int:
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
        try:
            with output.open("w") as file:
                Path(part.outcome).write_text(json.dumps(outcome_of(part, build, Console(file=file))))
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            os.environ.update({} if before is None else {"OMP_NUM_THREADS": before})
        return 0

    return run_part


def verify_resume(
    trial: ResumeTrial,
    *,
    keep: bool = False,
    say: Callable[[str], None] = lambda _text: None,
    run_part: RunPart = in_new_python,
    build: Build | None = None,
) -> Proof:
    """Run the trial in a temporary folder, which is kept if something differs, or with ``keep``.

    ``build`` makes the trained objects; None: the objects that ``trial.recipe`` names. An error of the user's code in
    a part is raised here, with its message and exit code.
    """
    # raises for a wrong recipe before anything runs
    recipe = (build or named(trial.recipe).build)(trial.settings).loaded.recipe
    folder = Path(tempfile.mkdtemp(prefix="trainwright-verify-"))
    proof = None
    try:
        proof = _TrialRuns(
            trial, folder, say, run_part, [*trial.settings, *_settings(recipe, trial.steps, folder)]
        ).prove(keep)
    finally:
        if proof is None or not proof.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return proof


@dataclass
class _TrialRuns:
    """The parts of a trial: their folder, and their common settings."""

    trial: ResumeTrial
    folder: Path
    say: Callable[[str], None]
    run_part: RunPart
    shared: list[str]

    def prove(self, keep: bool) -> Proof:
        """Run the straight and the interrupted run and compare them."""
        require_signals()
        begin_s, trial, n = time.monotonic(), self.trial, self.trial.steps
        straight = self._straight("straight")
        precision = read_as(straight.plan, PlanFile).precision
        self.shared.append(f"precision={precision}")  # measured once: two processes might measure differently
        halves = self._interrupted()
        upto, log, cause = n, _first_difference(straight, halves, range(1, n + 1), "before its end"), None
        if not log:
            self._resume(halves)
            upto, log = 2 * n, _first_difference(straight, halves, range(n + 1, 2 * n + 1), "resumed")
        unequal = tuple(differences(*(run.checkpoints / name_of(upto) for run in (straight, halves))))
        if log or unequal:  # up to step N there was no resume, so the resume cannot be the cause
            cause = "recipe" if upto == n else self._cause(straight)
        return Proof(
            trial,
            precision,
            tensors=examine(straight.checkpoints / name_of(upto)).num_tensors,
            samples=max(each.samples for each in read(straight.log).records if isinstance(each, Step)),
            seconds=time.monotonic() - begin_s,
            log=log,
            upto=upto,
            checkpoint=unequal,
            cause=cause,
            folder=self.folder if keep or log or unequal else None,
        )

    def _cause(self, straight: RunFolder) -> str:
        """Return "recipe" if a second straight run differs from the first, else "resume"."""
        self.say("something differs; a second straight run shows if two straight runs differ too:")
        again, last = self._straight("again"), name_of(2 * self.trial.steps)
        same = _table(read(again.log).records) == _table(read(straight.log).records)
        same = same and not any(differences(straight.checkpoints / last, again.checkpoints / last))
        return "resume" if same else "recipe"

    def _straight(self, name: str) -> RunFolder:
        """Run all 2N steps in one process."""
        n = self.trial.steps
        self.say(f"{2 * n} steps straight, {self.trial.workers} workers")
        outcome = self._run(name, [f"name={name}", f"data.workers={self.trial.workers}"])
        if outcome["step"] < 2 * n:
            raise UsageError(
                f"the data gave {outcome['step']} steps, and the proof needs {2 * n}",
                remedy=f"add --steps {max(1, outcome['step'] // 2)}",
            )
        run = RunFolder.open(outcome["run"])
        for step in (n, 2 * n):
            if not (run.checkpoints / name_of(step)).is_dir():
                raise StorageError(f"step {step} was not saved: {self._last_line(name)}", remedy=OTHER_DISK)
        return run

    def _interrupted(self) -> RunFolder:
        """Run until the checkpoint of step N is on disk. Then stop at step N, or kill the process some steps later."""
        trial, n = self.trial, self.trial.steps
        run, start = self.folder / "halves", ["name=halves", f"data.workers={trial.workers}"]
        if trial.kill:
            self.say(f"{n} steps and some, then SIGKILL")
            self._run("killed", start, end_at=n + max(1, n // 2), committed=str(run / "checkpoints" / name_of(n)))
        else:
            self.say(f"{n} steps, then stopped")
            self._run("stopped", start, end_at=n)
        return RunFolder.open(run)

    def _resume(self, run: RunFolder) -> None:
        workers = self.trial.then_workers
        self.say(f"resumed to {2 * self.trial.steps} steps, {workers} workers")
        self._run("resumed", [f"data.workers={workers}"], resume=str(run.path))

    def _run(
        self,
        name: str,
        settings: list[str],
        *,
        resume: str | None = None,
        end_at: int | None = None,
        committed: str | None = None,
    ) -> dict[str, Any]:
        """Run one part and return its outcome; {} if it was killed as planned. Raises the error that it raised."""
        outcome = self.folder / f"{name}.json"
        settings = settings if resume else [*self.shared, *settings]
        part = TrialPart(str(self.trial.recipe), settings, str(outcome), resume, end_at, committed)
        code = self.run_part(part, self.folder / f"{name}.txt", _environment())
        if part.committed and code == -signal.SIGKILL and Path(part.committed).is_dir():
            return {}
        if not outcome.exists():
            message = f"the {name} part ended with exit code {code}: {self._last_line(name)}"
            raise TrainwrightError(message, remedy="run it by hand: trainwright train")
        result: dict[str, Any] = json.loads(outcome.read_text())
        if "error" in result:
            error = TrainwrightError(result["error"])
            error.exit_code = result["exit"]
            raise error
        return result

    def _last_line(self, name: str) -> str:
        lines = (self.folder / f"{name}.txt").read_text(errors="replace").strip().splitlines()
        saving = [line for line in lines if "is not saved" in line]
        return (saving or lines or ["it printed nothing"])[-1]


def _settings(recipe: Recipe, n: int, folder: Path) -> list[str]:
    """Return the settings of a trial: 2N steps, a checkpoint at step N, every step logged, a short validation."""
    in_time, warmup = recipe.until.unit == "s", recipe.schedule.warmup
    fits = warmup.unit == "run" or (warmup.unit == "steps" and warmup.value < 2 * n)
    return [
        f"until={2 * n * STEP_S!r}s" if in_time else f"until={2 * n}steps",
        *([] if fits else ["schedule.warmup=0.25run"]),
        f"checkpoint.every={n}steps",
        "checkpoint.at_least_every=null",
        "checkpoint.keep=10",
        "checkpoint.best=null",  # it would save other steps too
        "checkpoint.restore_best=false",
        "observers=[]",  # one may end the trial
        f"evaluation.every={max(1, n // 2)}steps",
        "evaluation.batches=1",
        "log.every=1steps",
        "log.sinks=[]",
        "alerts=null",
        "log.doctor=false",  # a watched run has the same bits and starts more slowly
        f"folder={json.dumps(str(folder))}",
    ]


def _environment() -> dict[str, str]:
    """Return variables for the parts: the module path of this process, and one number of threads, for equal sums."""
    threads = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    return {"OMP_NUM_THREADS": threads, "PYTHONPATH": places}


_STEP_VALUES = ("ids_hash", "loss", "grad_norm", "lr", "weight", "samples", "tokens", "skipped", "probed")
_EVALUATION_VALUES = ("validation loss", "validation weight", "validation metrics")


def _table(records: Iterable[Record]) -> dict[int, dict[str, str]]:
    """Return the logged values of each step as text, which is equal if the bits are, NaN included."""
    table: dict[int, dict[str, str]] = {}
    for record in records:
        if isinstance(record, Step):
            row = {name: repr(getattr(record, name)) for name in _STEP_VALUES}
        elif isinstance(record, Evaluated):
            row = {name: repr(getattr(record, name.split()[1])) for name in _EVALUATION_VALUES}
        else:
            continue
        table.setdefault(record.step, {}).update(row)
    return table


def _first_difference(straight: RunFolder, halves: RunFolder, steps: range, which: str) -> str | None:
    """Return the first step whose log differs, as text. Only the newest process of ``halves`` counts."""
    records = read(halves.log).records
    begins = [i for i, record in enumerate(records) if isinstance(record, Started)]
    expected, seen = _table(read(straight.log).records), _table(records[begins[-1] :])
    for step in steps:
        one, two = expected.get(step, {}), seen.get(step, {})
        names = [name for name in (*_STEP_VALUES, *_EVALUATION_VALUES) if one.get(name) != two.get(name)]
        if names:
            first = names[0]
            values = f"{one.get(first)} straight, {two.get(first)} {which}"
            also = f"; also {', '.join(names[1:])}" if names[1:] else ""
            return f"first at step {step}, in {first}: {values}{also}"
    return None
