"""Kills a training at random times, resumes it, and compares it with an undisturbed training.

    python -m benchmarks.kill_campaign [--kills 300] [--seed 0] [--workers 1] [--jobs 1] [--fork] [--ranks 1]
                                       [--in-save 0]

One recipe is trained once to its end, with every checkpoint kept. Then it is trained repeatedly with a checkpoint after
each step, killed with SIGKILL, and resumed after each kill. After every kill, all committed checkpoints must verify and
have the bits of the undisturbed training at that step. At the end of a run, its log must have the same losses, gradient
norms and samples, each step once, and its last checkpoint the same bytes. The last line on stdout has the counts; from
``unloadable`` to ``best_differing``, each must be 0. ``--fork`` starts a training by fork from a process that has
imported all modules, which is faster. The seed determines the delays before the kills, not what they interrupt. With
``--in-save 0.5``, half of the kills come as soon as the writing of a checkpoint after the first begins.

A kill ends the process but not the machine, so the page cache is not lost: a power failure is not simulated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.killable import Place, Running, end_orphans, watched
from trainwright.checkpoint.manifest import verify
from trainwright.checkpoint.store import read_best
from trainwright.errors import CheckpointError
from trainwright.runs import reader
from trainwright.runs.records import Evaluated, Saved, Step

KEEP = 3
KILLS_PER_RUN = 8  # approximate number of kills of one run
DURING_START = 0.15  # fraction of kills before training has begun
FILES = ("model.safetensors", "rest.safetensors")
MOST_REFUSALS = 3  # consecutive failed starts after which a run is given up


@dataclass
class Counts:
    """Counts of a campaign. From ``unloadable`` on, each must be 0."""

    runs: int = 0  # runs that reached their end
    kills: int = 0
    kills_in_start: int = 0  # before the process wrote its first step
    kills_in_save: int = 0  # while a checkpoint was written
    resumes: int = 0
    begun_anew: int = 0  # new starts, because no checkpoint existed at the kill
    crash_loops: int = 0  # resumes that needed --accept crash-loop
    half_deleted: int = 0  # old checkpoints beyond the kept ones that do not verify
    steps_redone: int = 0
    most_redone: int = 0  # maximum of steps_redone after one kill
    orphans: int = 0  # data workers that are still alive long after their training was killed
    unloadable: int = 0  # a checkpoint had been saved, but none verifies
    torn: int = 0  # kept, committed checkpoints that do not verify
    lost_saves: int = 0  # the newest checkpoint that verifies is older than the last save in the log
    silently_corrupt: int = 0  # checkpoints that verify but have other bits
    refused: int = 0  # starts or resumes that ended neither by a kill nor at the end
    given_up: int = 0  # runs that did not reach their end
    samples_lost: int = 0
    samples_repeated: int = 0
    losses_differing: int = 0  # steps with another loss or gradient norm
    steps_missing: int = 0
    ends_differing: int = 0  # runs whose last checkpoint has other bytes
    best_differing: int = 0  # kills and ends after which the pointer to the best checkpoint is wrong

    def problems(self) -> dict[str, int]:
        """Returns the counts that must be 0 and are not."""
        names = [each.name for each in fields(self)]
        return {name: value for name in names[names.index("unloadable") :] if (value := getattr(self, name))}

    def add(self, other: Counts) -> None:
        most = max(self.most_redone, other.most_redone)
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.most_redone = most


class Hashes(NamedTuple):
    """The sha256 of the two tensor files of a checkpoint."""

    model: str
    rest: str


@dataclass(frozen=True)
class Reference:
    """The undisturbed run. ``hashes`` are by step; ``seconds`` is the time from its first step to its end."""

    hashes: dict[int, Hashes]
    steps: list[Step]
    validated: dict[int, float]  # loss by step
    best: dict[str, Any] | None
    seconds: float

    def best_until(self, step: int) -> int:
        """Returns the step of the best checkpoint at ``step``; 0 without one."""
        return min((each for each in self.validated if each <= step), key=lambda each: self.validated[each], default=0)


def hashes(checkpoint: Path) -> Hashes:
    """Returns hashes computed from the files, not read from the manifest."""
    return Hashes(*(hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in FILES))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def committed(run: Path) -> list[Path]:
    """Returns every committed checkpoint, newest first."""
    return sorted((run / "checkpoints").glob("step-*"), key=step_of, reverse=True)


def best(run: Path) -> dict[str, Any] | None:
    """Return the best checkpoint, as ``export --which best`` selects it."""
    known = read_best(run / "checkpoints")
    return asdict(known) if known else None


def verified(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def train_undisturbed(place: Place, steps: int) -> Reference:
    """Trains to the end with every checkpoint kept. Returns the values to compare, and deletes the run."""
    settings = (f"checkpoint.keep={steps + 1}", "checkpoint.asynchronous=false")
    with watched(place.train("undisturbed", *settings)) as process:
        if process.wait() != 0:
            raise SystemExit(f"the training that nobody disturbs failed:\n{place.said.read_text()}")
    run = place.run("undisturbed")
    by_step = {step_of(path): hashes(path) for path in committed(run)}
    assert sorted(by_step) == list(range(1, steps + 1)), f"saved were {sorted(by_step)}"
    seen = reader.read(run / "log.jsonl").records
    validated = {record.step: record.loss for record in seen if isinstance(record, Evaluated)}
    trained = trained_steps(run)
    reference = Reference(by_step, trained, validated, best(run), seen[-1].time_s - trained[0].time_s)
    shutil.rmtree(run)
    return reference


def trained_steps(run: Path) -> list[Step]:
    """Returns the steps that led to the present state of a run, each once."""
    return [each for each in reader.read_course(run / "log.jsonl") if isinstance(each, Step)]


def inspect(run: Path, reference: Reference) -> Counts:
    """Examines all committed checkpoints after a kill. All counts are 0 for a run without one."""
    seen, found = reader.read(run / "log.jsonl").records if (run / "log.jsonl").exists() else (), Counts()
    paths = committed(run)
    promised = {step_of(path) for path in paths[:KEEP]}
    if pointer := best(run):
        promised.add(pointer["step"])
    good = {step_of(path): path for path in paths if verified(path)}
    found.torn = len(promised - good.keys())
    found.half_deleted = len({step_of(path) for path in paths} - good.keys() - promised)
    found.silently_corrupt = sum(hashes(path) != reference.hashes[step] for step, path in good.items())
    saved = max((record.step for record in seen if isinstance(record, Saved)), default=0)
    found.unloadable = int(not good and bool(paths or saved))
    newest = max(good, default=0)
    found.lost_saves = int(newest < saved)
    before = reference.best_until(newest - 1)  # the newest may have been committed a moment before the pointer to it
    found.best_differing = int((pointer["step"] if pointer else 0) not in (before, reference.best_until(newest)))
    return found


def compare(run: Path, reference: Reference) -> Counts:
    """Compares the log and the last checkpoint of a completed run with the reference."""
    found = Counts(runs=1)
    mine = {step.step: step for step in trained_steps(run)}
    theirs = {step.step: step for step in reference.steps}
    found.steps_missing = len(theirs.keys() ^ mine.keys())
    found.losses_differing = sum(
        (mine[number].loss, mine[number].grad_norm) != (step.loss, step.grad_norm)
        for number, step in theirs.items()
        if number in mine
    )
    trained, wanted = _samples(mine), _samples(theirs)
    found.samples_lost, found.samples_repeated = (wanted - trained).total(), (trained - wanted).total()
    last = committed(run)[0]
    found.ends_differing = int(step_of(last) != len(theirs) or hashes(last) != reference.hashes[len(theirs)])
    found.best_differing = int(best(run) != reference.best)
    return found


def _samples(history: dict[int, Step]) -> Counter[str]:
    """Returns the number of samples by the hash of a step's sample ids, which depends on their order."""
    trained: Counter[str] = Counter()
    for step in history.values():
        trained[step.ids_hash] += int(step.weight)
    return trained


@dataclass
class Campaign:
    """One job: kills and resumes runs until it has made ``wanted`` kills, and lets the last run reach its end."""

    place: Place
    reference: Reference
    wanted: int
    seed: str
    in_save: float = 0.0  # fraction of kills as soon as the writing of a checkpoint after the first begins
    verbose: bool = False
    counts: Counts = field(default_factory=Counts)
    start_s: float = 3.0  # time from the start of a process to its first step

    def conduct(self) -> Counts:
        self._random = random.Random(self.seed)
        try:
            while self.counts.kills < self.wanted:
                self._run_to_end(f"killed-{self.counts.runs + self.counts.given_up}")
        finally:
            self.counts.orphans = end_orphans(self.place.folder)
        return self.counts

    def _run_to_end(self, name: str) -> None:
        run, refusals = self.place.run(name), 0
        options: tuple[str, ...] = ()
        while refusals < MOST_REFUSALS:
            resumed = bool(committed(run))
            if not resumed and run.exists():
                shutil.rmtree(run)
                self.counts.begun_anew += 1
            self.counts.resumes += resumed
            before = _unfinished(run)
            with watched(self.place.resume(name, *options) if resumed else self.place.train(name)) as process:
                phase = self._strike(process, run) if self.counts.kills < self.wanted else "to the end"
                code = process.wait()
            if code == -signal.SIGKILL:
                refusals, options = 0, ()
                self._killed(run, phase, len(_unfinished(run) - before))
                if committed(run) and step_of(committed(run)[0]) == len(self.reference.steps):
                    code = 0
            elif code and "crash-loop" in self.place.said.read_text() and not options:
                self._tell(run, Counts(crash_loops=1), said=self.place.said.read_text())
                options = ("--accept", "crash-loop")
            elif code:
                refusals += 1
                self._tell(run, Counts(refused=1), said=self.place.said.read_text())
            if code == 0:
                self._tell(run, compare(run, self.reference))
                shutil.rmtree(run)
                return
        self._tell(run, Counts(given_up=1))

    def _strike(self, process: Running, run: Path) -> str:
        """Waits for a random time and kills the process. Returns the phase: "start" or "training"."""
        log, begin_s = run / "log.jsonl", time.perf_counter()
        before, drafts = _steps(log), _unfinished(run)
        if self.in_save and self._random.random() < self.in_save:
            while process.poll() is None and not (_unfinished(run) - drafts and committed(run)):
                time.sleep(0.0005)
            process.kill()
            return "start" if _steps(log) == before else "training"
        early = self._random.random() < DURING_START
        delay_s = self._random.uniform(0, self.start_s if early else 2 * self.reference.seconds / KILLS_PER_RUN)
        while not early and _steps(log) == before and process.poll() is None:
            time.sleep(0.005)
        if not early:
            self.start_s = time.perf_counter() - begin_s
        end_s = time.perf_counter() + delay_s
        while process.poll() is None and (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, 0.05))
        if process.poll() is None:
            process.kill()
        return "start" if _steps(log) == before else "training"

    def _killed(self, run: Path, phase: str, unfinished: int) -> None:
        found = inspect(run, self.reference)
        found.kills, found.kills_in_start, found.kills_in_save = 1, int(phase == "start"), int(unfinished > 0)
        paths = committed(run)
        trained = trained_steps(run) if phase == "training" else []
        found.steps_redone = max(0, trained[-1].step - (step_of(paths[0]) if paths else 0)) if trained else 0
        found.most_redone = found.steps_redone
        self._tell(run, found, phase=phase, newest=paths[0].name if paths else None)

    def _tell(self, run: Path, found: Counts, **more: object) -> None:
        """Adds the counts. After a problem, copies the run before it is changed."""
        self.counts.add(found)
        line = {"run": run.name, **more, **{name: value for name, value in asdict(found).items() if value}}
        if found.problems() and run.exists():
            evidence = self.place.folder / f"evidence-{len(list(self.place.folder.glob('evidence-*')))}"
            shutil.copytree(run, evidence, ignore_dangling_symlinks=True)
            shutil.copy(self.place.said, evidence / "said.txt")
            line["evidence"] = str(evidence)
        if self.verbose or found.problems():
            sys.stderr.write(json.dumps(line) + "\n")


def _unfinished(run: Path) -> set[str]:
    """Returns the names of checkpoints that were not committed."""
    return {path.name for path in (run / "checkpoints").glob(".step-*")}


def _steps(log: Path) -> int:
    """Returns the number of steps in a log, including repeated ones."""
    return log.read_bytes().count(b'"kind":"step"') if log.exists() else 0


def conduct(campaign: Campaign) -> Counts:
    """Run a campaign in a separate process, which imports the modules that its forks need."""
    if campaign.place.fork or campaign.place.ranks > 1:
        import torch._dynamo  # noqa: F401  (the first optimizer of a process imports it: 1.2 s)

        import trainwright.cli
        import trainwright.training.run  # noqa: F401
    return campaign.conduct()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="of a run")
    parser.add_argument("--workers", type=int, default=1, help="processes of a training that load data")
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--step-ms", type=float, default=0.0, help="makes reading a batch slower")
    parser.add_argument("--fork", action="store_true", help="start trainings by fork")
    parser.add_argument("--in-save", type=float, default=0.0, help="share of kills while a checkpoint is written")
    parser.add_argument("--ranks", type=int, default=1, help="of each training; half of them are killed (forks)")
    parser.add_argument("--parallel", default="{}", help="their layout, as in a recipe: '{shard: 2}'")
    parser.add_argument("--verbose", action="store_true", help="a line on stderr for each kill and each end")
    parser.add_argument("--keep", action="store_true", help="do not delete the folder")
    return parser.parse_args()


def conduct_all(options: argparse.Namespace, folder: Path) -> Counts:
    """Runs the undisturbed training, then the jobs in parallel."""
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of several trainings that wait by spinning slow each other down
    torch.set_num_threads(1)  # for forked trainings
    os.environ["TMPDIR"] = str(folder)  # torch's workers leave a socket here when their parent is killed
    places = [Place(folder / f"job-{number}", options.fork, options.ranks) for number in range(options.jobs)]
    undisturbed = Place(folder / "undisturbed", ranks=options.ranks)
    for place in (undisturbed, *places):
        given = {name: getattr(options, name) for name in ("steps", "workers", "step_ms", "parallel")}
        place.make(**given, keep=KEEP)
    context = multiprocessing.get_context("fork" if options.fork else "spawn")
    with ProcessPoolExecutor(1, mp_context=context) as fresh:
        reference = fresh.submit(train_undisturbed, undisturbed, options.steps).result()
    shares = [options.kills // options.jobs + (number < options.kills % options.jobs) for number in range(options.jobs)]
    campaigns = [
        Campaign(place, reference, share, f"{options.seed}/{number}", options.in_save, options.verbose)
        for number, (place, share) in enumerate(zip(places, shares, strict=True))
    ]
    counts = Counts()
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for seen in pool.map(conduct, campaigns):
            counts.add(seen)
    return counts


def main() -> None:
    options, begin_s = arguments(), time.perf_counter()
    folder, counts = Path(tempfile.mkdtemp(prefix="kill-campaign-")).resolve(), Counts()
    try:
        counts = conduct_all(options, folder)
    finally:
        if options.keep or counts.problems():
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    line = {
        "bench": "kill_campaign",
        **asdict(counts),
        "final_bits_equal": counts.ends_differing == 0 and counts.runs > 0,
        **{name: getattr(options, name) for name in ("seed", "steps", "workers", "jobs", "fork", "ranks", "parallel")},
        "python": platform.python_version(),
        "torch": version("torch"),
        "seconds": round(time.perf_counter() - begin_s, 1),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
