"""Kills a training at random instants, resumes it, and compares it with one that nobody killed.

    python -m benchmarks.kill_campaign [--kills 300] [--seed 0] [--workers 1] [--jobs 1] [--fork] [--ranks 1]
                                       [--in-save 0]

A small model is trained twice from one recipe: once to its end, with every checkpoint kept, and then again and
again under SIGKILL, saving after each step and resuming after each death. After every kill all that is committed
must verify and hold the bits that the first training had at that step; at the end of a run its log must tell the
same losses, gradient norms and samples, each step once, and its last checkpoint must have the same bytes. The last
line on stdout counts; from ``unloadable`` to ``best_differing``, every figure must be 0. ``--fork`` starts a training
by fork from a process that has imported all of it: the same code, sooner. The seed gives the delays before the kills,
not the instants that they hit; ``--in-save 0.5`` kills half of the time as soon as a checkpoint after
the first is begun.

A kill takes the process and leaves the machine: what the page cache holds is not lost. This is no power cut.
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
KILLS_PER_RUN = 8  # about
DURING_START = 0.15  # the share of kills that come before training has begun
FILES = ("model.safetensors", "rest.safetensors")
MOST_REFUSALS = 3  # in a row, before a run is given up


@dataclass
class Counts:
    """Counts of a campaign. From ``unloadable`` on, each must be 0."""

    runs: int = 0  # to their end
    kills: int = 0
    kills_in_start: int = 0  # before the process wrote its first step
    kills_in_save: int = 0  # a checkpoint was being written
    resumes: int = 0
    begun_anew: int = 0  # killed before the first checkpoint
    crash_loops: int = 0  # taken for one: resumed with --accept
    half_deleted: int = 0  # an old checkpoint, no longer among those kept
    steps_redone: int = 0
    most_redone: int = 0  # after one kill
    orphans: int = 0  # processes that load data, alive long after the training that they loaded for
    unloadable: int = 0  # something had been saved, and nothing verifies
    torn: int = 0  # a committed checkpoint among those kept does not verify
    lost_saves: int = 0  # the log says saved, the newest that verifies is older
    silently_corrupt: int = 0  # verifies, and has other bits
    refused: int = 0  # a start or a resume that ended otherwise than by our hand or at the end
    given_up: int = 0  # runs that never came to their end
    samples_lost: int = 0
    samples_repeated: int = 0
    losses_differing: int = 0  # steps, by loss or gradient norm
    steps_missing: int = 0
    ends_differing: int = 0  # runs whose last checkpoint has other bytes
    best_differing: int = 0  # kills and ends after which the pointer to the best checkpoint is another

    def problems(self) -> dict[str, int]:
        """Whatever must not be."""
        names = [each.name for each in fields(self)]
        return {name: value for name in names[names.index("unloadable") :] if (value := getattr(self, name))}

    def add(self, other: Counts) -> None:
        most = max(self.most_redone, other.most_redone)
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.most_redone = most


class Hashes(NamedTuple):
    """sha256 of a checkpoint's two files of tensors."""

    model: str
    rest: str


@dataclass(frozen=True)
class Reference:
    """The run that nobody killed. ``hashes`` by step; ``seconds`` is the time from its first step to its end."""

    hashes: dict[int, Hashes]
    steps: list[Step]
    validated: dict[int, float]  # loss by step
    best: dict[str, Any] | None
    seconds: float

    def best_until(self, step: int) -> int:
        """The step of the best checkpoint then, 0 for none."""
        return min((each for each in self.validated if each <= step), key=lambda each: self.validated[each], default=0)


def hashes(checkpoint: Path) -> Hashes:
    """Read here, not from the manifest."""
    return Hashes(*(hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in FILES))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def committed(run: Path) -> list[Path]:
    """Every committed checkpoint, newest first."""
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
    """Trains to the end with every checkpoint kept; what is compared later is read and the rest deleted."""
    settings = (f"checkpoint.keep={steps + 1}", "checkpoint.asynchronous=false")
    with watched(place.train("undisturbed", *settings)) as process:
        if process.wait() != 0:
            raise SystemExit(f"the training that nobody disturbs failed:\n{place.said.read_text()}")
    run = place.run("undisturbed")
    by_step = {step_of(path): hashes(path) for path in committed(run)}
    assert sorted(by_step) == list(range(1, steps + 1)), f"saved were {sorted(by_step)}"
    seen = reader.read(run / "log.jsonl").records
    validated = {record.step: record.loss for record in seen if isinstance(record, Evaluated)}
    trained = reader.steps(seen)
    reference = Reference(by_step, trained, validated, best(run), seen[-1].time_s - trained[0].time_s)
    shutil.rmtree(run)
    return reference


def inspect(run: Path, reference: Reference) -> Counts:
    """Judges all that is committed after a kill. A run that never saved has nothing to judge."""
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
    """Judges a run that came to its end: its history and its last checkpoint."""
    found = Counts(runs=1)
    mine = {step.step: step for step in reader.steps(reader.read(run / "log.jsonl").records)}
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
    """How many samples were trained on, by the hash of the step's ids, which tells which and in what order."""
    trained: Counter[str] = Counter()
    for step in history.values():
        trained[step.ids_hash] += int(step.weight)
    return trained


@dataclass
class Campaign:
    """One job: kills runs until it has its share of kills, and brings the last of them to its end."""

    place: Place
    reference: Reference
    wanted: int
    seed: str
    in_save: float = 0.0  # the share of kills that come as soon as a checkpoint after the first is begun
    verbose: bool = False
    counts: Counts = field(default_factory=Counts)
    start_s: float = 3.0  # how long a process takes to its first step

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
        """Waits for a random instant and kills; says in which phase."""
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
        trained = reader.steps(reader.read(run / "log.jsonl").records) if phase == "training" else []
        found.steps_redone = max(0, trained[-1].step - (step_of(paths[0]) if paths else 0)) if trained else 0
        found.most_redone = found.steps_redone
        self._tell(run, found, phase=phase, newest=paths[0].name if paths else None)

    def _tell(self, run: Path, found: Counts, **more: object) -> None:
        """Counts; keeps what a problem left behind before anything changes it."""
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
    """Names of checkpoints that were never committed."""
    return {path.name for path in (run / "checkpoints").glob(".step-*")}


def _steps(log: Path) -> int:
    """How many steps a log tells, those that were done again included."""
    return log.read_bytes().count(b'"kind":"step"') if log.exists() else 0


def conduct(campaign: Campaign) -> Counts:
    """Run a campaign in a separate process. It imports what its forks need, and computes nothing itself."""
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
    """The undisturbed training, then the jobs side by side."""
    os.environ["OMP_NUM_THREADS"] = "1"  # two trainings that spin for each other crawl
    torch.set_num_threads(1)  # of those that are forked
    os.environ["TMPDIR"] = str(folder)  # where torch's workers leave a socket when their parent is killed
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
