"""Saving when it is due: training waits for a copy in memory, a thread writes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from trainwright.engine.evaluate import Evaluated
from trainwright.errors import CheckpointError, StorageError, TrainwrightError, suggest
from trainwright.observe.cadence import Every
from trainwright.state.checkpoint import Snapshot, capture, commit, tensors_of
from trainwright.state.staging import Staging, num_bytes
from trainwright.state.store import Best, Retention, prune, read_best, write_best
from trainwright.state.train_state import TrainState

MOST_OF_FREE_MEMORY = 0.8


@dataclass(frozen=True)
class SavePolicy:
    """When to save and what to keep.

    ``every`` may be None: only at the end. ``at_least_s`` is the age in seconds, by the clock on the wall, at which
    the last save is too old. ``best`` is "loss" or a metric of the validation.
    """

    every: Every | None = None
    at_least_s: float | None = None
    retention: Retention = field(default_factory=Retention)
    best: str | None = None
    best_is_largest: bool = False
    asynchronous: bool = True


class Told(Protocol):
    """Whoever wants to hear of a checkpoint on disk; ``path`` is relative to the run folder."""

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None: ...


@dataclass(frozen=True)
class _Done:
    """A checkpoint on disk. ``trouble`` is what went wrong after it was there."""

    path: Path
    num_bytes: int
    seconds: float
    trouble: str = ""


class Saving:
    """A Saver. One save is in flight at most: the next one waits for it.

    A save that fails leaves the run going, warned, and older checkpoints intact. The copy takes as much host memory
    as the state; where that is not free, training waits for the write instead. ``before`` is called ahead of each
    save; ``papers`` are kept in each checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        policy: SavePolicy,
        *,
        told: Told,
        warn: Callable[[str], None],
        papers: Mapping[str, Any] | None = None,
        before: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._policy, self._told, self._warn = folder, policy, told, warn
        self._papers, self._before, self._clock = papers, before, clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._staging: Staging | None = None
        self._reserving: Future[None] | None = None
        self._writing: tuple[int, float, Future[_Done]] | None = None  # step, how long training waited
        self._saved_step, self._saved_s = -1, clock()
        self._best, self._better = read_best(folder) if policy.best else None, False
        self.last: Path | None = None
        self.last_s: float | None = None

    def due(self, state: TrainState) -> bool:
        """Also tells of a write that has ended since. Costs no host sync."""
        if self._writing and self._writing[2].done():
            self._finish()
        if self._policy.asynchronous and not self._reserving:
            self._reserve(state)  # not sooner: an optimizer has its state from the first step on
        every = self._policy.every is not None and self._policy.every.due(state)
        too_old = self._policy.at_least_s is not None and self._clock() - self._saved_s >= self._policy.at_least_s
        return every or too_old or self._better

    def __call__(self, state: TrainState) -> None:
        if self._saved_step == state.step:
            return
        begin_s = time.perf_counter()
        self._finish()
        self._before()
        self._saved_step, self._saved_s = state.step, self._clock()
        if self._reserving:
            self._reserving.result()
        try:
            snapshot = capture(state, self._staging, self._papers)
        except CheckpointError as error:
            self._not_saved(state.step, error)
            return
        best = self._best if self._better and self._best and self._best.step == state.step else None
        self._better = False
        future = self._thread.submit(self._write, snapshot, best)
        if self._staging is None:  # what is being written are the live tensors
            wait([future])
        self._writing = state.step, time.perf_counter() - begin_s, future

    def _write(self, snapshot: Snapshot, best: Best | None) -> _Done:
        """In the thread: commits, and only then lets older ones go."""
        begin_s, trouble = time.perf_counter(), ""
        path, written = commit(snapshot, self._folder)
        try:
            if best:
                write_best(self._folder, best)
            prune(self._folder, path, self._policy.retention)
        except OSError as error:
            trouble = f"step {snapshot.step} is saved, but the folder could not be tidied up: {error}"
        return _Done(path, written, time.perf_counter() - begin_s, trouble)

    def _finish(self) -> None:
        """Waits for the write in flight and tells what came of it."""
        if self._writing is None:
            return
        (step, blocked_s, future), self._writing = self._writing, None
        try:
            done = future.result()
        except (StorageError, CheckpointError) as error:
            self._not_saved(step, error)
            return
        self.last, self.last_s = done.path, done.seconds
        self._told.saved(step, f"{done.path.parent.name}/{done.path.name}", done.num_bytes, done.seconds, blocked_s)
        if done.trouble:
            self._warn(done.trouble)

    def _not_saved(self, step: int, error: TrainwrightError) -> None:
        self._warn(f"step {step} is not saved: {error.message} ({error.remedy})")

    def evaluated(self, step: int, seen: Evaluated) -> None:
        """Hears of a validation: the best one so far is worth a checkpoint."""
        metric = self._policy.best
        if metric is None:
            return
        values = {"loss": seen.loss, **seen.metrics}
        if metric not in values:
            self._warn(f"checkpoint.best: the validation has no metric {metric!r}: {suggest(metric, values)}")
            return
        sign = -1.0 if self._policy.best_is_largest else 1.0
        known = self._best if self._best and self._best.metric == metric else None
        if math.isfinite(values[metric]) and (known is None or sign * values[metric] < sign * known.value):
            self._best, self._better = Best(step, metric, values[metric]), True

    def close(self) -> None:
        """Waits until what was asked for is on disk."""
        self._finish()
        self._thread.shutdown()

    def __exit__(self, *error: object) -> None:
        """As ``close``; who interrupts twice does not wait, and keeps the checkpoint before."""
        if any(isinstance(each, BaseException) and not isinstance(each, Exception) for each in error):
            self._thread.shutdown(wait=False, cancel_futures=True)
        else:
            self.close()

    def _reserve(self, state: TrainState) -> None:
        """Memory for the copy is made beside the next steps; none where it would not fit."""
        try:
            tensors = tensors_of(state)
        except CheckpointError:  # told when it is to be saved
            tensors = {}
        needed, free = num_bytes(tensors), psutil.virtual_memory().available
        self._reserving = self._thread.submit(lambda: None)
        if needed > MOST_OF_FREE_MEMORY * free:
            self._warn(f"checkpoints are written while training waits: a copy takes {needed / 1e9:.3g} GB of memory")
            return
        self._staging = Staging()
        self._reserving = self._thread.submit(self._staging.reserve, tensors)
