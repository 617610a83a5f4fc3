"""Saves checkpoints when due: training waits for a copy in memory, and a thread writes it to disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from trainwright.checkpoint.checkpoint import TensorName, capture_live, commit, tensors_of
from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.remote import CheckpointCopies
from trainwright.checkpoint.sharded import SavedPart, ShardedSave
from trainwright.checkpoint.staging import Staging, num_bytes, on_host
from trainwright.checkpoint.store import Best, Retention, make_room, prune, read_best, repair_best, write_best
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import World
from trainwright.distributed.memory import free_bytes
from trainwright.distributed.threads import single_threaded, small_stacks
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.loop import Saver
from trainwright.errors import CheckpointError, DiskFullError, RankError, TrainwrightError, UsageError, text_of
from trainwright.monitoring.cadence import Every
from trainwright.runs.storage import storage_error

P = ParamSpec("P")
R = TypeVar("R")
MAX_FREE_MEMORY_FRACTION = 0.8
MIN_FRACTION_SAVE_INTERVAL_S = 5.0
"""Minimum seconds between two saves that are due by a fraction of the run. A shorter interval is not worth a save."""


@dataclass(frozen=True)
class SavePolicy:
    """When to save and what to keep.

    Attributes:
        every: The cadence; None: only at the end.
        min_interval_s: Seconds after the last save, or the beginning, within which ``every`` is ignored.
        max_age_s: Wall-clock age of the last save, in seconds, after which a new one is due.
        best: "loss" or a metric of the validation; None: no best checkpoint is kept.
        best_batches: Number of batches of the evaluations that are compared (0: the full set). Others are ignored.
        asynchronous: True if a thread writes the checkpoints.
    """

    every: Every | None = None
    min_interval_s: float = 0.0
    max_age_s: float | None = None
    retention: Retention = field(default_factory=Retention)
    best: str | None = None
    best_is_largest: bool = False
    best_batches: int = 0
    asynchronous: bool = True


class SaveListener(Protocol):
    """Receives the outcome of each save. ``path`` is relative to the run folder."""

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None: ...
    def not_saved(self, step: int, reason: str) -> None: ...


@dataclass(frozen=True)
class _Done:
    """A checkpoint on disk. ``trouble`` is an error after it was written."""

    path: Path
    num_bytes: int
    seconds: float
    trouble: str = ""


_free_on_host = partial(free_bytes, torch.device("cpu"))


class _WriterThread:
    """Writes copies of the state in a thread. Without memory for a copy, training waits for the write instead."""

    def __init__(self, *, asynchronous: bool, warn: Callable[[str], None], free_memory: Callable[[], int]) -> None:
        self._asynchronous, self._warn, self._free_memory = asynchronous, warn, free_memory
        self._executor = _started_thread()
        self._is_prepared = False
        self._staging: Staging | None = None
        self._reserving: Future[None] | None = None

    def prepare(self, state: TrainState, tensors_of_state: Callable[[TrainState], Mapping[TensorName, Tensor]]) -> None:
        """Start to allocate memory for the copy during training, unless it would not fit or memory ran out.

        Only the first call has an effect. It must come after the first step, because the optimizer has no state before.
        Raises CheckpointError for state that cannot be stored in a file.
        """
        if self._is_prepared:
            return
        self._is_prepared = True
        tensors = tensors_of_state(state)
        if not self._asynchronous or isinstance(self._executor, _NoThread) or state.micro_limit is not None:
            return
        needed = num_bytes(tensors)
        if needed > MAX_FREE_MEMORY_FRACTION * self._free_memory():
            self._warn(f"checkpoints are written while training waits: a copy takes {needed / 1e9:.3g} GB of memory")
            return
        self._staging = Staging()
        self._reserving = self._executor.submit(self._staging.reserve, tensors)

    def stop_copying(self) -> None:
        """Free the memory of the copy. Training waits for later saves."""
        self._staging = None

    def on_host(self, tensors: Mapping[TensorName, Tensor]) -> Mapping[TensorName, Tensor]:
        """Return copies of the tensors, or the live tensors, with one warning, if there is no memory for a copy."""
        if self._staging is None:
            return on_host(tensors)
        try:
            reserving, self._reserving = self._reserving, None
            if reserving:
                reserving.result()
            return self._staging.copy(tensors)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory runs out
            hosted = on_host(tensors)  # raises again unless the copy was the cause
            self._staging = None
            self._warn(
                f"checkpoints are written while training waits: the state cannot be copied ({_first_words(error)})"
            )
            return hosted

    def submit(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start to write. If the live tensors are written, wait until they are on disk."""
        future = self._executor.submit(work, *args, **kwargs)
        if self._staging is None:
            wait([future])
        return future

    def end(self, *, waits: bool = True) -> None:
        self._executor.shutdown(wait=waits, cancel_futures=not waits)


class Saving:
    """A Saver. At most one save is in flight: the next one waits for it.

    A failed save never stops the run. It prints a warning, and older checkpoints stay intact. The copy needs as much
    host memory as the state. If ``free_memory`` (bytes) is not enough, or the copy fails, training waits for the write
    instead. ``folder_guard`` is called before and after each save, because the folder may have been deleted. ``run`` is
    the identity of the run, and ``run_metadata`` is stored in each checkpoint. ``shards`` is passed on the first of
    several ranks, each of which writes a part. ``copies`` copies each checkpoint to another storage.
    """

    def __init__(
        self,
        folder: Path,
        policy: SavePolicy,
        *,
        listener: SaveListener,
        warn: Callable[[str], None],
        run: str = "",
        run_metadata: Mapping[str, Any] | None = None,
        folder_guard: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        free_memory: Callable[[], int] = _free_on_host,
        shards: ShardedSave | None = None,
        copies: CheckpointCopies | None = None,
    ) -> None:
        self._shards = shards
        self._copies = copies
        self._folder = folder
        self._policy = policy
        self._listener = listener
        self._warn = warn
        self._run = run
        self._run_metadata = run_metadata
        self._folder_guard = folder_guard
        self._clock = clock
        self._thread = _WriterThread(asynchronous=policy.asynchronous, warn=warn, free_memory=free_memory)
        self._writing: tuple[int, float, Future[_Done]] | None = None  # step, seconds that training waited
        self._saved, self._saved_s = (-1, False), clock()
        self._best = BestSoFar(folder, policy, run)
        self.last: Path | None = None
        self.last_s: float | None = None

    def due(self, state: TrainState) -> bool:
        """Return True if a save is due. Also reports a write that has ended. Needs no host sync.

        The first call prepares the copy, and raises CheckpointError for state that cannot be stored in a file.
        """
        if self._writing and self._writing[2].done():
            self._finish()
        self._thread.prepare(state, self._shards.tensors if self._shards else tensors_of)
        if state.micro_limit is not None and self._writing is None:  # memory has run out: no room for the copy
            self._thread.stop_copying()
        policy, age_s = self._policy, self._clock() - self._saved_s
        every = policy.every is not None and policy.every.due(state) and age_s >= policy.min_interval_s
        too_old = policy.max_age_s is not None and age_s >= policy.max_age_s
        return every or too_old or self._best.at(state.step) is not None

    def __call__(self, state: TrainState) -> None:
        if self._saved == (state.step, state.ema.is_complete):
            return
        begin_s = time.perf_counter()
        self._finish()
        self._saved, self._saved_s = (state.step, state.ema.is_complete), self._clock()
        try:
            write = self._captured(state)
        except RankError:
            raise
        except Exception as error:  # raised on each rank, so that no rank waits for another
            self._not_saved(state.step, error)
            return
        future = self._thread.submit(self._write, state.step, write, self._best.at(state.step))
        self._writing = state.step, time.perf_counter() - begin_s, future

    rescue = __call__

    def _captured(self, state: TrainState) -> Callable[[Best | None], tuple[Path, int]]:
        """Return a function that writes the state of this step, from a copy or from the live tensors."""
        if self._shards is None:
            self._folder_guard()
            snapshot = capture_live(state, self._run_metadata)
            hosted = replace(snapshot, tensors=self._thread.on_host(snapshot.tensors))
            return lambda best: commit(hosted, self._folder, best, self._run)
        shards = self._shards
        part = shards.capture(state, self._folder, self._run, self._run_metadata or {}, self._folder_guard)
        part = replace(part, tensors=self._thread.on_host(part.tensors))

        def write(best: Best | None) -> tuple[Path, int]:
            written = shards.write(part, self._folder, best, self._run)
            assert written is not None, "the first rank commits"
            return written

        return write

    def _write(self, step: int, write: Callable[[Best | None], tuple[Path, int]], best: Best | None) -> _Done:
        """Write the checkpoint, and only then delete older ones, unless the disk has no room. Runs in the thread."""
        begin_s, trouble = time.perf_counter(), ""
        while True:
            try:
                path, written = write(best)
                break
            except DiskFullError:
                if not make_room(self._folder, step, self._policy.retention, self._run):
                    raise
        try:
            if best:
                write_best(self._folder, best, self._run)
            if self._copies:
                self._copies.take(path)
            prune(self._folder, path, self._policy.retention, self._run)
        except Exception as error:
            trouble = f"step {step} is saved, but older checkpoints could not be removed or copied: {error}"
        return _Done(path, written, time.perf_counter() - begin_s, trouble)

    def _finish(self) -> None:
        """Wait for the write in progress and report its outcome."""
        for message in self._copies.messages() if self._copies else ():
            self._warn(message)
        if self._writing is None:
            return
        (step, blocked_s, future), self._writing = self._writing, None
        try:
            done = future.result()
        except Exception as error:
            self._not_saved(step, error)
            return
        self._best.update(step)
        self.last, self.last_s = done.path, done.seconds
        self._listener.saved(step, f"{done.path.parent.name}/{done.path.name}", done.num_bytes, done.seconds, blocked_s)
        if done.trouble:
            self._warn(done.trouble)
        try:
            self._folder_guard()
        except Exception as error:
            known = _with_remedy(error, self._folder)
            self._warn(
                f"step {step} is saved, but the folder of the run lacks its metadata: {known.message} ({known.remedy})"
            )

    def _not_saved(self, step: int, error: Exception) -> None:
        self._best.update(step)
        known = _with_remedy(error, self._folder)
        reason = f"{known.message} ({known.remedy})"
        self._warn(f"step {step} is not saved: {reason}")
        self._listener.not_saved(step, reason)

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        """Handle the result of an evaluation: the best one so far is saved, unless this step was saved already."""
        if self._writing and self._best.at(self._writing[0]):
            self._finish()  # the value to beat is known only when the previous best is on disk
        best = self._best.evaluated(step, seen)
        if best is None or step != self._saved[0]:
            return
        self._finish()
        if self.last and step_of(self.last) == step:
            try:
                write_best(self._folder, best, self._run)
            except OSError as error:
                self._warn(f"step {step} is the best so far, but that could not be recorded: {error}")
        self._best.update(step)

    def close(self) -> None:
        """Wait until all saves are on disk, and the last one is copied."""
        self._finish()
        self._thread.end()
        if self._copies is not None:
            if self._copies.in_progress:
                self._warn(f"waiting until the last checkpoint is copied to {self._copies.place.url}")
            for message in self._copies.close():
                self._warn(message)

    def __exit__(self, *error: object) -> None:
        """Close, but do not wait after a second interrupt: the previous checkpoint remains."""
        if any(isinstance(each, BaseException) and not isinstance(each, Exception) for each in error):
            self._thread.end(waits=False)
            if self._copies:
                self._copies.close(waits=False)
        else:
            self.close()


class _NoThread(Executor):
    """Runs work at once, if there was no memory for a thread."""

    def submit(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        done: Future[R] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def _started_thread() -> Executor:
    """Return an executor whose thread already runs. At the first save there may be no memory left for its stack."""
    thread = ThreadPoolExecutor(1, "checkpoint", initializer=single_threaded)
    try:
        with small_stacks():
            thread.submit(lambda: None)
    except RuntimeError:
        return _NoThread()
    return thread


def _with_remedy(error: Exception, folder: Path) -> TrainwrightError:
    """Return ``error`` as one with a remedy."""
    if isinstance(error, TrainwrightError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, folder, "write")
    remedy = "older checkpoints are intact; fix this error, or the next save fails too"
    return CheckpointError(_first_words(error), remedy=remedy)


def _first_words(error: Exception) -> str:
    return " ".join(text_of(error).split())[:400]


class BestSoFar:
    """The best checkpoint of ``best.json`` in ``folder``, and a better result that is not on disk yet.

    ``run`` is the identity of the run.
    """

    def __init__(self, folder: Path, policy: SavePolicy, run: str = "") -> None:
        self._folder = folder
        self._policy = policy
        self._run = run
        self._on_disk = repair_best(folder, run)
        self._pending: Best | None = None

    def evaluated(self, step: int, seen: EvaluationResult) -> Best | None:
        """Return the result after ``step`` if it is the best so far, so that a checkpoint should be saved.

        Raises UsageError if there is no such metric.
        """
        metric = self._policy.best
        if metric is None or seen.batches != self._policy.best_batches:
            return None
        try:
            value = seen.figure(metric)
        except UsageError as error:
            raise UsageError(f"checkpoint.best: {error.message}", remedy=error.remedy) from None
        found = Best(step, metric, value, seen.batches)
        known = self._pending or self._on_disk
        if math.isfinite(found.value) and (known is None or self._beats(found, known)):
            self._pending = found
            return found
        return None

    def _beats(self, found: Best, known: Best) -> bool:
        if known.metric != found.metric or known.batches not in (found.batches, None):
            return True
        return found.value > known.value if self._policy.best_is_largest else found.value < known.value

    def at(self, step: int) -> Best | None:
        """Return the best result from ``step``, unless it is on disk already or could not be saved."""
        return self._pending if self._pending and self._pending.step == step else None

    def update(self, step: int) -> None:
        """Read which checkpoint on disk is the best. Call it when the save of ``step`` has ended, successful or not."""
        self._on_disk = read_best(self._folder, self._run)
        if self._pending and self._pending.step <= step:
            self._pending = None


class PartSaving:
    """A Saver of a rank after the first: writes its part of each checkpoint. The first rank reports the outcome."""

    def __init__(
        self,
        folder: Path,
        shards: ShardedSave,
        *,
        asynchronous: bool,
        warn: Callable[[str], None] = lambda _line: None,
        free_memory: Callable[[], int] = _free_on_host,
    ) -> None:
        self._folder, self._shards = folder, shards
        self._thread = _WriterThread(asynchronous=asynchronous, warn=warn, free_memory=free_memory)
        self._writing: Future[object] | None = None

    def due(self, state: TrainState) -> bool:
        self._thread.prepare(state, self._shards.tensors)
        if state.micro_limit is not None and (self._writing is None or self._writing.done()):
            self._thread.stop_copying()
        return False

    def __call__(self, state: TrainState) -> None:
        self._finish()
        try:
            part: SavedPart = self._shards.capture(state, self._folder, "", {}, lambda: None)
        except CheckpointError:  # the first rank reports it
            return
        part = replace(part, tensors=self._thread.on_host(part.tensors))
        self._writing = self._thread.submit(self._shards.write, part, self._folder)

    def _finish(self) -> None:
        """Wait for the write in progress. It fails if the first rank is lost, which the next exchange reports."""
        if self._writing is not None:
            wait([self._writing])
            self._writing = None

    def rescue(self, state: TrainState) -> None: ...

    def __exit__(self, *error: object) -> None:
        self._finish()
        self._thread.end()


class SavingTogether:
    """A Saver for each rank: ``saver`` is a Saving on the first rank, which decides when, and a PartSaving on others.

    There is no save after an exception, because ranks without the exception would not take part.
    """

    def __init__(self, world: World, saver: Saver) -> None:
        self._world = world
        self._saver = saver
        self._saved = -1, False

    def due(self, state: TrainState) -> bool:
        """Return True if a save is due. Costs an exchange of eight bytes."""
        is_due = self._saver.due(state)
        return self._world.least(int(not is_due)) == 0

    def __call__(self, state: TrainState) -> None:
        if self._saved == (state.step, state.ema.is_complete):
            return
        self._saved = state.step, state.ema.is_complete
        self._saver(state)

    def rescue(self, state: TrainState) -> None: ...
    def __exit__(self, *error: object) -> None:
        self._saver.__exit__(*error)
