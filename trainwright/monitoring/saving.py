"""Saves when it is due: training waits for a copy in memory, and a thread writes it to disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from trainwright.checkpoint.checkpoint import CheckpointData, capture, commit, tensors_of
from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.staging import Staging, num_bytes
from trainwright.checkpoint.store import Best, Retention, prune, write_best
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.memory import free_bytes
from trainwright.distributed.threads import single_threaded, small_stacks
from trainwright.engine.evaluate import EvaluationResult
from trainwright.errors import CheckpointError, TrainwrightError, text_of
from trainwright.monitoring.best import BestSoFar
from trainwright.monitoring.cadence import Every
from trainwright.runs.storage import storage_error

P = ParamSpec("P")
R = TypeVar("R")
MOST_OF_FREE_MEMORY = 0.8
SHARES_APART_S = 5.0
"""Seconds that lie at least between two saves which a share of the run asks for: shorter ones are not worth a save."""


@dataclass(frozen=True)
class SavePolicy:
    """When to save and what to keep.

    ``every`` may be None: only at the end. What it asks for is passed over within ``apart_s`` seconds of the last save,
    or of the begin. ``at_least_s`` is the age in seconds, by the clock on the wall, at which the last save is too old.
    ``best`` is "loss" or a metric of the validation, on ``best_batches`` batches (0: all of
    them): a value on others does not compare.
    """

    every: Every | None = None
    apart_s: float = 0.0
    at_least_s: float | None = None
    retention: Retention = field(default_factory=Retention)
    best: str | None = None
    best_is_largest: bool = False
    best_batches: int = 0
    asynchronous: bool = True


class SaveListener(Protocol):
    """Is called with the outcome of each save; ``path`` is relative to the run folder."""

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None: ...
    def not_saved(self, step: int, reason: str) -> None: ...


@dataclass(frozen=True)
class _Done:
    """A checkpoint on disk. ``trouble`` is what went wrong after it was written."""

    path: Path
    num_bytes: int
    seconds: float
    trouble: str = ""


_free_on_host = partial(free_bytes, torch.device("cpu"))


class Saving:
    """A Saver. One save is in flight at most: the next one waits for it.

    A save that fails, whatever the reason, leaves the run going, warned, and older checkpoints intact. The copy takes
    as much host memory as the state; where ``free_memory`` (bytes) has no room for it or it cannot be made, training
    waits for the write instead. ``keep_there`` is called ahead of each save and after it, for the folder may have been
    deleted; ``run`` is the identity of the run, and ``run_metadata`` are kept in each checkpoint.
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
        keep_there: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        free_memory: Callable[[], int] = _free_on_host,
    ) -> None:
        self._folder, self._policy, self._listener, self._warn = folder, policy, listener, warn
        self._run, self._run_metadata, self._keep_there = run, run_metadata, keep_there
        self._clock, self._free_memory = clock, free_memory
        self._thread = _thread()
        self._looked = False
        self._staging: Staging | None = None
        self._reserving: Future[None] | None = None
        self._writing: tuple[int, float, Future[_Done]] | None = None  # step, how long training waited
        self._saved, self._saved_s = (-1, False), clock()
        self._best = BestSoFar(
            folder, policy.best, is_largest=policy.best_is_largest, batches=policy.best_batches, warn=warn, run=run
        )
        self.last: Path | None = None
        self.last_s: float | None = None

    def due(self, state: TrainState) -> bool:
        """Whether to save now. Also reports a write that has ended since. Costs no host sync.

        The first call looks at what is to be saved, and raises CheckpointError for state that no file can take.
        """
        if self._writing and self._writing[2].done():
            self._finish()
        if not self._looked:  # not sooner: an optimizer has its state from the first step on
            self._look(state)
        if state.micro_limit is not None and self._writing is None:  # memory has run out: the copy takes too much
            self._staging = None
        policy, age_s = self._policy, self._clock() - self._saved_s
        every = policy.every is not None and policy.every.due(state) and age_s >= policy.apart_s
        too_old = policy.at_least_s is not None and age_s >= policy.at_least_s
        return every or too_old or self._best.at(state.step) is not None

    def __call__(self, state: TrainState) -> None:
        if self._saved == (state.step, state.ema.is_complete):
            return
        begin_s = time.perf_counter()
        self._finish()
        self._saved, self._saved_s = (state.step, state.ema.is_complete), self._clock()
        try:
            snapshot = self._captured(state)
        except Exception as error:
            if state.saves_together:  # the other ranks cannot know that this one did not take part to the end
                raise
            self._not_saved(state.step, error)
            return
        try:
            self._keep_there()
        except Exception as error:
            self._not_saved(state.step, error)
            return
        future = self._thread.submit(self._write, snapshot, self._best.at(state.step))
        if self._staging is None:  # what is being written are the live tensors
            wait([future])
        self._writing = state.step, time.perf_counter() - begin_s, future

    rescue = __call__

    def _captured(self, state: TrainState) -> CheckpointData:
        """Returns a copy of the state, or the live tensors where memory has no room for one, with one warning."""
        if self._staging is None:
            return capture(state, None, self._run_metadata)
        try:
            reserving, self._reserving = self._reserving, None
            if reserving:
                reserving.result()
            return capture(state, self._staging, self._run_metadata)
        except (MemoryError, RuntimeError) as error:  # torch has no room: RuntimeError
            if state.saves_together:
                raise
            snapshot = capture(state, None, self._run_metadata)  # raises again unless it was the copy
            self._staging = None
            self._warn(f"checkpoints are written while training waits: no copy can be made ({_brief(error)})")
            return snapshot

    def _write(self, snapshot: CheckpointData, best: Best | None) -> _Done:
        """In the thread: writes the checkpoint, and only then deletes older ones."""
        begin_s, trouble = time.perf_counter(), ""
        path, written = commit(snapshot, self._folder, best, self._run)
        try:
            if best:
                write_best(self._folder, best, self._run)
            prune(self._folder, path, self._policy.retention, self._run)
        except Exception as error:
            trouble = f"step {snapshot.step} is saved, but the folder could not be tidied up: {error}"
        return _Done(path, written, time.perf_counter() - begin_s, trouble)

    def _finish(self) -> None:
        """Waits for the write in progress and reports its outcome."""
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
            self._keep_there()
        except Exception as error:
            known = _explained(error, self._folder)
            self._warn(
                f"step {step} is saved, but the folder of the run lacks its metadata: {known.message} ({known.remedy})"
            )

    def _not_saved(self, step: int, error: Exception) -> None:
        self._best.update(step)
        known = _explained(error, self._folder)
        reason = f"{known.message} ({known.remedy})"
        self._warn(f"step {step} is not saved: {reason}")
        self._listener.not_saved(step, reason)

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        """Notes the result of an evaluation: the best one so far is saved, unless this step was saved already."""
        if self._writing and self._best.at(self._writing[0]):
            self._finish()  # what the next best has to beat is known when that one is on disk
        best = self._best.evaluated(step, seen)
        if best is None or step != self._saved[0]:
            return
        self._finish()
        if self.last and step_of(self.last) == step:
            try:
                write_best(self._folder, best, self._run)
            except OSError as error:
                self._warn(f"step {step} is the best so far, but that could not be kept: {error}")
        self._best.update(step)

    def close(self) -> None:
        """Waits until all saves are on disk."""
        self._finish()
        self._thread.shutdown()

    def __exit__(self, *error: object) -> None:
        """Like ``close``, but a second interrupt does not wait: the checkpoint before it remains."""
        if any(isinstance(each, BaseException) and not isinstance(each, Exception) for each in error):
            self._thread.shutdown(wait=False, cancel_futures=True)
        else:
            self.close()

    def _look(self, state: TrainState) -> None:
        """Starts to allocate memory for the copy while training goes on, unless it would not fit or memory ran out."""
        self._looked = True
        tensors = tensors_of(state)
        if not self._policy.asynchronous or isinstance(self._thread, _NoThread) or state.micro_limit is not None:
            return
        needed = num_bytes(tensors)
        if needed > MOST_OF_FREE_MEMORY * self._free_memory():
            self._warn(f"checkpoints are written while training waits: a copy takes {needed / 1e9:.3g} GB of memory")
            return
        self._staging = Staging()
        self._reserving = self._thread.submit(self._staging.reserve, tensors)


class _NoThread(Executor):
    """Does at once what it is given: there was no memory for a thread."""

    def submit(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        done: Future[R] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def _thread() -> Executor:
    """One that runs already: the first save may come when there is no memory for its stack."""
    thread = ThreadPoolExecutor(1, "checkpoint", initializer=single_threaded)
    try:
        with small_stacks():
            thread.submit(lambda: None)
    except RuntimeError:
        return _NoThread()
    return thread


def _explained(error: Exception, folder: Path) -> TrainwrightError:
    """Returns ``error`` as one that has a remedy."""
    if isinstance(error, TrainwrightError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, folder, "write")
    remedy = "older checkpoints are intact; mend what it names, or the next save fails too"
    return CheckpointError(_brief(error), remedy=remedy)


def _brief(error: Exception) -> str:
    return " ".join(text_of(error).split())[:400]
