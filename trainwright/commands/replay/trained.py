"""Replays a step of the Trainwright engine by training to it from the newest checkpoint before it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.checkpoint import read_run_metadata
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.manifest import read_manifest, step_of, verify
from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.checkpoint.store import checkpoints
from trainwright.commands.replay.change import StepChange
from trainwright.commands.replay.result import Compared, Rerun, Say, examine_replay
from trainwright.commands.replay.watched import UNBOUNDED, compared
from trainwright.engine.step import StepResult
from trainwright.errors import CheckpointError, UsageError, text_of
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import load
from trainwright.recorder.engine_source import EngineSource, engine_recorder
from trainwright.recorder.hooks import listening
from trainwright.recorder.numbers import as_record
from trainwright.recorder.program import others_of
from trainwright.recorder.ring import Ring
from trainwright.replay import bundle as bundles
from trainwright.replay.bundle import BundleError
from trainwright.replay.replayer import NotReplayable, Replayer
from trainwright.replay.session import ReplaySession
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.json_values import Facts
from trainwright.runs.lock import RunLock
from trainwright.runs.reader import read
from trainwright.runs.records import Ended, Examined, Record, Started, Step, Watched
from trainwright.runs.shapes import CrashLoopFile, PlanFile, read_as, read_object
from trainwright.training.custom_objects import spike_handler
from trainwright.training.job import Job, make_advance, until_of
from trainwright.training.prepare import prepare
from trainwright.training.resume import Earlier
from trainwright.training.run import process_settings
from trainwright.watching.budget import ExaminationBudget
from trainwright.watching.experiments import ExperimentRunner, names_of

HISTORY_STEPS = 8  # recorded steps before the replayed one, because remedies are tried on consecutive steps


@dataclass(frozen=True)
class Origin:
    """The data for replaying a run of the engine: recipe, plan, and a checkpoint, or None for the initial state."""

    source: Path
    step: int
    recipe: Path
    plan: Path
    checkpoint: Path | None
    records: Sequence[Record]

    @classmethod
    def of_run(cls, folder: RunFolder, step: int) -> Origin:
        if step < 1:
            raise UsageError(f"there is no step {step}", remedy="steps count from 1")
        records = read_records(folder.log)
        last = (_plan(folder.plan).get("extent") or {}).get("steps") or _last_step(records)
        if last is not None and step > last:
            raise UsageError(f"{folder.path} has {last} steps, and no step {step}", remedy="name one of its steps")
        older = (each for each in checkpoints(folder.checkpoints, identity_of(folder)) if (step_of(each) or 0) < step)
        later = {_number(each): each for each in folder.path.glob("recipe-before-step-*.yaml")}
        recipe = next((later[at] for at in sorted(later) if step <= at), folder.recipe)
        return cls(folder.path, step, recipe, folder.plan, next(filter(_is_intact, older), None), records)

    @classmethod
    def of_crash_loop(cls, path: Path) -> Origin:
        about = read_as(path / bundles.NAME, CrashLoopFile)
        if not (path / "recipe.yaml").exists():
            raise BundleError(f"{path} is not a complete bundle of a crash loop", remedy="replay the run itself")
        held = path / "checkpoint" if about.checkpoint else None
        if held:
            verify(held)
        log = path.parent.parent / "log.jsonl"
        return cls(path, about.step, path / "recipe.yaml", path / "plan.json", held, read_records(log))


def _plan(path: Path) -> Facts:
    """Return plan.json: the plan with the measurements from the beginning of the run."""
    return read_object(path, PlanFile) if os.path.lexists(path) else {}


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("recipe-before-step-")
    return int(digits) if digits.isdecimal() else 0


def read_records(log: Path) -> Sequence[Record]:
    """Return the records of a log; none if it does not exist."""
    return read(log).records if os.path.lexists(log) else ()


def _last_step(records: Sequence[Record]) -> int | None:
    """Return the last step of a run that ended, including one that raised; None if it continues or was killed."""
    end = records[-1] if records else None
    return end.step + (end.ending == "failed") if isinstance(end, Ended) else None


def _is_intact(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def rerun_trained(
    origin: Origin,
    step: int,
    settings: tuple[str, ...],
    say: Say,
    parts: Parts | None = None,
    change: StepChange | None = None,
) -> Rerun:
    """Train to ``step`` and examine it, or try ``change`` on it.

    ``parts``, the objects of a run of ``tw.fit``, must not be used afterwards.
    """
    done = Rerun(step, origin.source, settings=settings)
    with tempfile.TemporaryDirectory(prefix="trainwright-replay-") as aside, process_settings():
        lock = RunLock.acquire(Path(aside))
        try:
            job = _job(origin, RunFolder(Path(aside)), lock, done, parts)
            begin = job.state.step
            if begin >= step:
                raise UsageError(f"the replay begins after step {begin}", remedy="name a later step")
            say(f"training from step {begin} to {step}, in a separate folder")
            fractions = _fractions(origin.records)
            _note_unknown(job, fractions, done)
            live = _Live(job, step, _seconds(origin.records), fractions)
            live.go()
            done.error = live.error
            _compare_trained(done, origin, begin, live)
        finally:
            lock.release(clean=True)
        if change is not None:
            done.changed = change.tried(ReplaySession(Replayer(live.objects, names_of(live.objects)), live.ring, step))
            return done
        known = [r for r in origin.records if isinstance(r, Watched | Examined) and r.step < live.first]
        known += [as_record(each) for each in live.ring.recorded(step)]
        if live.unfinished is not None:
            known.append(Examined(time_s=time.time(), step=step, experiment="unfinished", values=live.unfinished))
        examine_replay(done, live.runner, known)
    return done


def _job(origin: Origin, folder: RunFolder, lock: RunLock, done: Rerun, parts: Parts | None) -> Job:
    """Return the run before its next step, in a separate folder."""
    quiet = ["log.sinks=[]", "alerts=null", *done.settings]
    planned = _plan(origin.plan)
    if origin.checkpoint is None:
        kept = [f"precision={planned['precision']}"] if "precision" in planned else []
        if parts is not None and parts.custom.generators is not None:
            done.inexact = True
            done.notes.append(
                "the run did not seed the random generators, their state is not recorded, and no checkpoint precedes "
                "this step: weights and order may differ; pass seed= to tw.fit"
            )
        job = prepare(in_one_process(load(origin.recipe, overrides=[*kept, *quiet], environ={})), parts)
        threads = planned.get("threads", job.plan.threads)
        return dataclasses.replace(job, plan=dataclasses.replace(job.plan, threads=threads))
    number = read_manifest(origin.checkpoint)["step"]
    held = folder.checkpoints / f"step-{number:08d}"
    held.mkdir(parents=True)
    for file in origin.checkpoint.iterdir():
        _link(file, held / file.name)
    again = f"trainwright replay {origin.source}"
    earlier = Earlier(folder, lock, held, read_run_metadata(held), ("all",), lambda _paths, _undo=(): again, done.notes)
    return prepare(in_one_process(load(origin.recipe, overrides=quiet, environ={})), parts, earlier=earlier)


def _link(source: Path, target: Path) -> None:
    """Hard-link a checkpoint, because a living run may delete it while it is read; symlink it as a fallback."""
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source.absolute())


def _note_unknown(job: Job, fractions: dict[int, float], done: Rerun) -> None:
    """Note steps whose learning rate is unknown. If the run's length is in seconds, the rates follow the clock and are
    read from the log.
    """
    unknown = [at for at in range(job.state.step + 1, done.step + 1) if at not in fractions]
    if job.plan.extent.seconds is not None and unknown:
        done.inexact = True
        done.notes.append(
            f"the length of the run is in seconds, so its learning rate follows the clock, and the log lacks "
            f"it for {len(unknown)} of {done.step - job.state.step} steps"
        )


def _compare_trained(done: Rerun, origin: Origin, begin: int, live: _Live) -> None:
    """Compare the trained step with the log. If the step was not logged, replay it and compare with the replay."""
    done.compared += _as_logged(origin.records, begin, live)
    if not any(each.what in ("loss", "error") for each in done.compared):
        done.notes.append(f"the log has no record of step {done.step}: the step is compared with a replay")
        try:
            session = ReplaySession(Replayer(live.objects, names_of(live.objects)), live.ring, done.step)
            done.compared += compared(session.recorded_step, session.run(upto="step"), live.objects)
        except NotReplayable as error:
            done.notes.append(f"the replay was not possible: {error}")


class _Live:
    """Trains a run up to the step, and records its last steps."""

    def __init__(self, job: Job, step: int, seconds: dict[int, float], fractions: dict[int, float]) -> None:
        state = job.state
        self.job = job
        self.step = step
        self._seconds = seconds
        self._fractions = fractions
        self.first = max(state.step + 1, step - HISTORY_STEPS)
        self.ring = Ring(keep=HISTORY_STEPS + 1, budget_bytes=UNBOUNDED)
        self._recorder = recorder = engine_recorder(state, self.ring.add, self.first)
        self.objects = LiveObjects(recorder.roots, recorder.optimizers, recorder.parameters)
        self._source = EngineSource(self._recorder)
        self.runner = ExperimentRunner(self.objects, self.ring, ExaminationBudget(job.device, "all"))
        self.results: dict[int, StepResult] = {}
        self.error: str | None = None
        self.unfinished: Facts | None = None

    def go(self) -> None:
        """Train up to the step with the engine. An exception in an earlier step is not caught."""
        state, until = self.job.state, until_of(self.job.plan)
        advance = make_advance(self.job, witness=self._source, spikes=spike_handler(self.job.loaded))
        stream = iter(self.job.batches)
        with ExitStack() as stack:
            stack.callback(self._recorder.stop_modes)
            while state.step < self.step and self.error is None:
                state.fraction = self._fractions.get(state.step + 1, until(state))
                batch = next(stream, None) if state.fraction < 1.0 else None
                if batch is None:
                    raise UsageError(f"the run ends with step {state.step}", remedy="name one of its steps")
                if state.step + 1 == self.first:
                    stack.enter_context(listening([self._recorder], self.objects.roots))
                if state.step + 1 in (self.first, self.step) and not self._has_snapshot(state.step + 1):
                    self._keep_state()
                try:
                    self._note(advance(state, batch))
                except Exception as error:
                    if state.step + 1 < self.step:
                        raise
                    self.error = text_of(error)
                    self.unfinished = self.runner.unfinished(self._recorder.current, self._recorder.tape, error)

    def _has_snapshot(self, step: int) -> bool:
        return any(snapshot.step == step for snapshot in self.ring.snapshots)

    def _keep_state(self) -> None:
        newest = self.ring.steps[-1].program if self.ring.steps else []
        self.objects.further = {id(each): each for _, each in others_of(newest)}
        self.ring.add_snapshot(self.objects.snapshot(self.job.state.step + 1))

    def _note(self, result: StepResult) -> None:
        self.job.state.elapsed_s += self._seconds.get(result.step, 0.0)
        self.results[result.step] = dataclasses.replace(
            result, batch=StepBatch(tuple(MicroBatch(None, micro.ids) for micro in result.batch.micro))
        )
        if result.step >= self.first:
            self._source.end_step(result)
            if self._recorder.failed is not None:
                raise self._recorder.failed
            if result.spike is not None and result.spike.action == "rollback":  # a rollback restores an older state
                self._keep_state()


def _windows(records: Iterable[Record]) -> dict[int, tuple[int, Step]]:
    """Return (since, record) of each logged step: its newest record, which covers the steps after ``since``."""
    found, since = {}, 0
    for record in records:
        if isinstance(record, Started):
            since = record.step
        if isinstance(record, Step):
            found[record.step] = (since, record)
            since = record.step
    return found


def _seconds(records: Iterable[Record]) -> dict[int, float]:
    """Return the duration of each step; exact if every step was logged."""
    return {at: one.step_s for since, one in _windows(records).values() for at in range(since + 1, one.step + 1)}


def _fractions(records: Iterable[Record]) -> dict[int, float]:
    """Return the completed fraction of the run at the beginning of each step, as far as it is in the log."""
    return {since + 1 + at: each for since, one in _windows(records).values() for at, each in enumerate(one.fractions)}


def _as_logged(records: Sequence[Record], begin: int, live: _Live) -> Iterator[Compared]:
    """Compare logged with computed numbers, of the step and of the steps before it."""
    logged, step = _windows(records), live.step
    earlier = [at for at in sorted(logged) if begin < at < step and at in live.results]
    if earlier:
        then = [logged[at][1].loss for at in earlier]
        yield Compared(f"losses of {len(earlier)} steps before", then, [float(live.results[at].loss) for at in earlier])
    if live.error is not None:
        ends = [record for record in records if isinstance(record, Ended) and record.step in (step - 1, step)]
        failed = [record.reason for record in ends if record.ending == "failed"]
        yield Compared("error", failed[-1] if failed else None, live.error)
        return
    result = live.results[step]
    if step in logged:
        since, one = logged[step]
        yield Compared("loss", one.loss, float(result.loss))
        yield Compared("gradient norm", one.grad_norm, float(result.grad_norm))
        yield Compared("learning rate", one.lr, result.lr)
        if since >= begin:
            ids = [micro.ids.tobytes() for at in range(since + 1, step + 1) for micro in live.results[at].batch.micro]
            yield Compared("sample ids", one.ids_hash, hashlib.blake2b(b"".join(ids), digest_size=8).hexdigest())
        return
    watched = [each for each in records if isinstance(each, Watched) and each.step == step]
    if watched:
        yield Compared("loss", watched[-1].loss, float(result.loss))
        yield Compared("learning rate", watched[-1].lr, result.lr)
