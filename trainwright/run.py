"""Composition of a run of our own engine: from a recipe to a trained model in one run folder."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainwright import __version__
from trainwright.build.assemble import LIVE, Parts, build_loading, validation_batches
from trainwright.data.fingerprint import fingerprint
from trainwright.engine.loop import NEVER, Observer, Outcome, Until, for_seconds, for_steps, run
from trainwright.errors import CheckpointError, UsageError
from trainwright.job import Job, Kept, make_advance, prepare
from trainwright.observe.cadence import Every
from trainwright.observe.logbook import Logbook
from trainwright.observe.periodic import Evaluation, Saving
from trainwright.observe.progress import Progress
from trainwright.observe.signals import Signals
from trainwright.plan.duration import Interval
from trainwright.plan.explain import preflight
from trainwright.plan.make import Plan
from trainwright.recipe import Duration, Loaded, dump
from trainwright.report.text import Ending, closing
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.provenance import provenance
from trainwright.runlog.records import Ended
from trainwright.state.checkpoint import checkpoints, newest_valid
from trainwright.state.train_state import TrainState
from trainwright.world.group import SOLO, World


@dataclass(frozen=True)
class Result:
    """How a run ended. ``exit_code``: 0, 75 when it was asked to stop and is saved, 1 when its end is not saved.

    ``state`` is the live state, the average of the weights (``state.ema``) included.
    """

    run: Path
    ending: str
    reason: str
    step: int
    loss: float | None
    val_loss: float | None
    skipped: int
    exit_code: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    state: TrainState | None = None

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        names = ("ending", "step", "loss", "val_loss", "skipped")
        return {"run": str(self.run), **{name: getattr(self, name) for name in names}}


Extra = Callable[[Job, RunFolder, Progress], Observer]
"""Makes a further observer of a run, once everything else of it exists."""


def train(
    loaded: Loaded,
    *,
    parts: Parts | None = None,
    resume: RunFolder | None = None,
    accept: Sequence[str] = (),
    console: Console | None = None,
    quiet: bool = False,
    extras: Sequence[Extra] = (),
    world: World = SOLO,
) -> Result:
    """Runs a recipe from its first step, or from the newest checkpoint of ``resume``, to its end.

    ``parts`` are live objects instead of what the recipe names. ``accept`` lists the differences to the first
    part of the run that are wanted. ``world.clock`` gives the time that a run budgeted in seconds goes by. Raises
    a TrainwrightError for whatever is the user's to mend.
    """
    said: list[str] = []
    progress = Progress(console or Console(), quiet=quiet)
    signals = Signals(progress.say)
    with process_settings(), ExitStack() as closing_down:
        closing_down.callback(progress.close)
        closing_down.callback(signals.close)
        signals.listen()
        kept = _kept(resume, said.append) if resume else None
        job = prepare(loaded, parts, kept=kept)
        progress.marks = job.marks
        folder = _continued(resume, job) if resume else _new_folder(job)
        if kept:
            said.append(f"resumed from {kept.checkpoint} at step {job.state.step}")
        for line in [*said, *preflight(job.plan)]:
            progress.say(line)
        return _run(job, folder, progress, signals, kept.checkpoint if kept else None, extras, world)


@contextmanager
def process_settings() -> Iterator[None]:
    """Torch's process-wide settings that a run changes are put back after it."""
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    tf32, deterministic = torch.backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(deterministic)


def _run(
    job: Job,
    folder: RunFolder,
    progress: Progress,
    signals: Signals,
    restored: Path | None,
    extras: Sequence[Extra],
    world: World,
) -> Result:
    recipe, plan, state = job.recipe, job.plan, job.state
    loading = build_loading(job.parts, recipe, plan, job.device)
    logbook = Logbook(
        folder,
        _every(plan.log_every, state),
        sinks=recipe.log.sinks,
        config=recipe.model_dump(mode="json"),
        state=state,
        gpu_indices=[gpu.index for gpu in job.machine.gpus] if job.device.type == "cuda" else [],
        warn=progress.say,
    )
    with logbook:
        logbook.start(__version__, restored)
        saving = Saving(
            folder.checkpoints,
            _every(plan.save_every, state) if plan.save_every else None,
            keep=recipe.checkpoint.keep,
            recorded=logbook.recorder.saved,
            warn=progress.say,
        )
        validation = validation_batches(job.parts, recipe, loading)
        evaluation = (
            None
            if validation is None
            else Evaluation(
                validation,
                job.parts.loss,
                _every(plan.evaluate_every, state),
                precision=job.precision,
                told=(logbook.recorder, progress),
            )
        )
        extra = [make(job, folder, progress) for make in extras]
        advance = make_advance(job)
        outcome = run(
            state,
            job.batches,
            advance,
            until=_until(plan),
            observers=(logbook.recorder, logbook.telemetry, progress, *extra, signals),
            evaluation=evaluation or NEVER,
            saving=saving,
            world=world,
        )
        logbook.recorder.tell_skipped(state)
        logbook.ended = _ended(outcome, evaluation, logbook)
    return _closed(job, folder, outcome, logbook, saving.last, progress)


def _new_folder(job: Job) -> RunFolder:
    """A run folder with its papers: what was asked, what was decided, where it ran."""
    folder = RunFolder.create(job.recipe.folder, job.recipe.name)
    folder.write_text("recipe.yaml", dump(job.recipe))
    folder.write_json("plan.json", job.plan.to_json())
    sets = {"train": job.parts.train, "val": job.parts.val}
    prints = {name: fingerprint(data.dataset) for name, data in sets.items() if data is not None}
    papers = provenance(
        data_fingerprints={name: f"sha256:{each.sha256} ({each.how})" for name, each in prints.items()},
        seeds={"seed": job.recipe.seed},
        command=sys.argv,
    )
    folder.write_json("provenance.json", papers)
    return folder


def _continued(folder: RunFolder, job: Job) -> RunFolder:
    """The same folder with the recipe and plan that hold from here on; earlier ones are kept beside them.

    Raises UsageError when nothing is left to do.
    """
    if _until(job.plan)(job.state) >= 1.0:
        done, until = f"{job.state.step:,} steps in {job.state.elapsed_s:.4g} s", job.recipe.until
        longer = f"--set until={_doubled(until)}"
        raise UsageError(f"the run has done what it was asked for ({done}, until: {until})", remedy=f"add {longer}")
    before, now = folder.recipe.read_text(encoding="utf-8"), dump(job.recipe)
    if before != now:
        folder.write_text(f"recipe-before-step-{job.state.step:08d}.yaml", before)
        folder.write_text("recipe.yaml", now)
        folder.write_json("plan.json", job.plan.to_json())
    return folder


def _until(plan: Plan) -> Until:
    return for_steps(plan.extent.steps) if plan.extent.steps else for_seconds(plan.extent.seconds or 0.0)


def _doubled(until: Duration) -> Duration:
    return Duration(min(until.value * 2, 2.0**53), until.unit)


def _kept(resume: RunFolder, say: Callable[[str], None]) -> Kept:
    """What the run's first part decided, and its newest checkpoint that verifies; says which newer ones do not."""
    path, broken = newest_valid(resume.checkpoints)
    for message in broken:
        say(f"stepped over: {message}")
    anew = f"start it anew: {_program()} train {shlex.quote(str(resume.recipe))}"
    if path is None:
        raise CheckpointError("\n".join([*broken, f"{resume.path} has no checkpoint that verifies"]), remedy=anew)
    try:
        plan = json.loads(resume.plan.read_text())
        return Kept(plan["precision"], plan["threads"], path)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{resume.plan} cannot be read: {error}", remedy=anew) from None


def _program() -> str:
    """How this command line was called, so that what is printed can be pasted: a path unless it is on PATH."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m trainwright"
    if called.name != "trainwright" or shutil.which("trainwright") == str(called.absolute()):
        return "trainwright"
    return shlex.quote(str(called))


def _every(interval: Interval, since: TrainState) -> Every:
    return Every(steps=interval.steps, seconds=interval.seconds, fraction=interval.fraction, since=since)


def _ended(outcome: Outcome, evaluation: Evaluation | None, logbook: Logbook) -> Ended:
    seen = evaluation.last if evaluation else None
    return Ended(
        time_s=time.time(),
        ending=outcome.ending,
        reason=outcome.stop.reason if outcome.stop else "",
        step=outcome.step,
        loss=float(outcome.last.loss) if outcome.last else None,
        val_loss=seen.loss if seen else None,
        skipped=logbook.recorder.num_skipped,
        seconds=logbook.seconds,
    )


def _closed(
    job: Job, folder: RunFolder, outcome: Outcome, logbook: Logbook, saved: Path | None, progress: Progress
) -> Result:
    """Says the closing words and gives the result."""
    progress.close()
    ended, recorder = logbook.ended, logbook.recorder
    assert ended is not None
    is_saved = saved is not None and saved.name == f"step-{outcome.step:08d}"
    live, until = job.recipe.model.use.startswith(f"{LIVE}:"), job.recipe.until
    ending = Ending(
        ended,
        folder.path,
        recorder.last_step,
        recorder.last_evaluated,
        saved=is_saved,
        marks=job.marks,
        again=f"tw.fit(..., resume={str(folder.path)!r})" if live else _again(folder),
        longer="" if live else f"--set until={_doubled(until)}",
    )
    for line in closing(ending):
        progress.say(line)
    return Result(
        folder.path,
        ended.ending,
        ended.reason,
        ended.step,
        ended.loss,
        ended.val_loss,
        ended.skipped,
        (outcome.stop.exit_code if outcome.stop else 0) if is_saved else 1,
        dict(ending.evaluated.metrics) if ending.evaluated else {},
        job.state,
    )


def _again(folder: RunFolder) -> str:
    """The command that goes on with a run, or begins it anew where nothing could be saved."""
    if folder.checkpoints.is_dir() and checkpoints(folder.checkpoints):
        return f"{_program()} resume {shlex.quote(str(folder.path))}"
    return f"{_program()} train {shlex.quote(str(folder.recipe))}"
