"""Writes results of the loop to log.jsonl and to the sinks. The run folder needs no tracker."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

import numpy as np
import psutil
import torch
from torch import Tensor

from trainwright.checkpoint.cursor import Ids
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.metrics import MetricSet
from trainwright.engine.step import StepResult
from trainwright.engine.user_log import LoggedMeans, collecting
from trainwright.errors import OomReport
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.media import MediaWriter
from trainwright.monitoring.sinks import Sink
from trainwright.runs import records
from trainwright.runs.media import Loggable

STEPS_PER_SUM = 16
"""Steps that are summed in one call. Summing each step alone takes several times as long, due to cache misses."""

_Brief: TypeAlias = tuple[Ids, float, float, float]
"""Values of each step for a record: sample ids, seconds, seconds of waiting, completed fraction of the run."""


class StepLog:
    """An observer. For a step that is not due it keeps the sample ids and the times, without a host sync.

    A due step reads loss, gradient norm and skipped updates, and so waits for the GPU. ``step_s`` and ``wait_s`` of a
    record are means over the steps since the last record, and ``ids_hash`` covers all their sample ids. The last step
    is always recorded. ``by_the_clock``: the length of the run is in seconds.
    """

    def __init__(
        self,
        journal: Journal,
        sinks: Sequence[Sink],
        every: Every,
        *,
        already_skipped: int = 0,
        by_the_clock: bool = False,
        wall_clock: Callable[[], float] = time.time,
        media: MediaWriter | None = None,
    ) -> None:
        self._journal = journal
        self._media = media
        self._sinks = sinks
        self._every = every
        self._wall_clock = wall_clock
        self._process = psutil.Process()
        self._memory, self._memory_due_s = 0, -math.inf
        self._by_the_clock = by_the_clock
        self._all_steps_s = 0.0
        self._all_waits_s = 0.0
        self._all_reads_s = 0.0
        self._all_count = 0
        self.step = 0
        self.num_skipped = already_skipped
        self.last_evaluated: records.Evaluated | None = None
        self.window: Callable[[], Mapping[str, float]] = dict
        """Returns further measurements over the steps since the last record."""
        self.shown: Callable[[], Mapping[str, Loggable]] = dict
        """Returns the images, texts and histograms since the last record."""
        self._start_window()

    def _start_window(self) -> None:
        self._ids = hashlib.blake2b(digest_size=8)
        self._count = 0
        self._step_s = 0.0
        self._wait_s = 0.0
        self._fractions: list[float] = []
        self._newest: list[_Brief] = []
        self._unrecorded: tuple[StepResult, TrainState] | None = None

    @property
    def wait_fraction(self) -> float:
        """The fraction of the time of all steps of this process in which they waited for data."""
        self._add_up()
        return self._all_waits_s / self._all_steps_s if self._all_steps_s else 0.0

    @property
    def wait_s(self) -> float:
        """The mean seconds that a step of this process waited for data."""
        self._add_up()
        return self._all_waits_s / max(1, self._all_count)

    @property
    def read_s(self) -> float:
        """The mean seconds that reading processes took for the batch of a step of this process."""
        return self._all_reads_s / max(1, self._all_count + len(self._newest))

    def observe(self, result: StepResult, state: TrainState) -> None:
        self.step = result.step
        self._all_reads_s += result.batch.read_s
        if result.batch.bad or result.oom_reports:
            self._note_trouble(result)
        self._newest.append((result.batch.global_ids, result.step_s, result.wait_s, state.fraction))
        if len(self._newest) == STEPS_PER_SUM:
            self._add_up()
        self._unrecorded = (result, state)
        if self._every.due(state) or result.step == 1:
            self._record(result, state)

    def _add_up(self) -> None:
        if not self._newest:
            return
        ids, steps_s, waits_s, fractions = zip(*self._newest, strict=True)
        self._newest = []
        self._ids.update(np.concatenate(ids).tobytes())
        self._count += len(steps_s)
        self._step_s += sum(steps_s)
        self._wait_s += sum(waits_s)
        self._all_steps_s += sum(steps_s)
        self._all_waits_s += sum(waits_s)
        self._all_count += len(steps_s)
        if self._by_the_clock:
            self._fractions.extend(fractions)

    def _note_trouble(self, result: StepResult) -> None:
        for bad in result.batch.bad:
            now_s = self._wall_clock()
            self._journal.write(
                records.Quarantined(time_s=now_s, step=result.step, sample_ids=(bad.id,), reason=bad.what)
            )
        self.out_of_memory(result.oom_reports)

    def _record(self, result: StepResult, state: TrainState) -> None:
        self.record_skipped(state)
        self._add_up()
        measured: dict[str, Tensor | float] = {**result.metrics, **result.probed, **self.window()}
        record = records.Step(
            time_s=self._wall_clock(),
            step=result.step,
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            lr=result.lr,
            weight=float(result.weight),
            samples=state.num_samples,
            tokens=state.num_tokens,
            step_s=self._step_s / self._count,
            wait_s=self._wait_s / self._count,
            skipped=len(state.ledger.entries),
            mem_bytes=self._memory_bytes(result),
            ids_hash=self._ids.hexdigest(),
            probed={name: float(value) for name, value in measured.items()},
            fractions=tuple(self._fractions),
        )
        self._journal.write(record)
        if self._sinks:
            values = {"loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr, **record.probed}
            values |= {"step_s": record.step_s, "wait_s": record.wait_s, "skipped": float(record.skipped)}
            self._to_sinks(result.step, {f"train/{name}": value for name, value in values.items()})
        self._write_shown()
        self._start_window()

    def _write_shown(self) -> None:
        if self._media is not None and (shown := self.shown()):
            self._media.write(self.step, shown)

    def _memory_bytes(self, result: StepResult) -> int:
        """Return the peak of the GPU, or the host memory of this process, which is read at most once per second."""
        if result.grad_norm.device.type == "cuda":
            return torch.cuda.max_memory_allocated(result.grad_norm.device)
        now_s = self._wall_clock()
        if now_s >= self._memory_due_s:
            self._memory, self._memory_due_s = int(self._process.memory_info().rss), now_s + 1.0
        return self._memory

    def record_skipped(self, state: TrainState) -> None:
        """Write a record for each newly skipped update in the ledger. Costs one host sync."""
        state.ledger.read_pending()
        for entry in state.ledger.entries[self.num_skipped :]:
            self._journal.write(
                records.Skipped(
                    time_s=self._wall_clock(),
                    step=entry.step,
                    reason=entry.reason,
                    micro_batch=entry.micro_batch,
                    sample_ids=entry.sample_ids,
                    scale_before=entry.scale,
                    scale_after=_halved(entry.scale) if not math.isfinite(entry.grad_norm) else entry.scale,
                )
            )
        self.num_skipped = len(state.ledger.entries)

    def out_of_memory(self, reports: Sequence[OomReport]) -> None:
        for report in reports:
            self._journal.write(records.OutOfMemory(time_s=self._wall_clock(), **vars(report)))

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        self.last_evaluated = records.Evaluated(
            time_s=self._wall_clock(),
            step=step,
            loss=seen.loss,
            weight=seen.weight,
            metrics=dict(seen.metrics),
            seconds=seen.seconds,
            batches=seen.batches,
            bad_samples=seen.bad_samples,
        )
        self._journal.write(self.last_evaluated)
        values = {"val/loss": seen.loss} | {f"val/{name}": value for name, value in seen.metrics.items()}
        self._to_sinks(step, values)
        if self._media is not None:
            self._media.write(step, {f"validation/{name}": value for name, value in seen.shown.items()})

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None:
        """Write one Saved record. ``path`` is relative to the run folder."""
        now_s = self._wall_clock()
        self._journal.write(
            records.Saved(time_s=now_s, step=step, path=path, bytes=num_bytes, seconds=seconds, blocked_s=blocked_s)
        )

    def not_saved(self, step: int, reason: str) -> None:
        self._journal.write(records.NotSaved(time_s=self._wall_clock(), step=step, reason=reason))

    def _to_sinks(self, step: int, values: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.scalars(step, values)

    def close(self) -> None:
        """Record the last step. The journal and the sinks are closed by their owner."""
        if self._unrecorded is not None:
            with suppress(RuntimeError):  # a GPU has failed, and its exception is already being raised
                self._record(*self._unrecorded)
        with suppress(RuntimeError):
            self._write_shown()  # observers may have logged after the last record


def _halved(scale: float | None) -> float | None:
    return None if scale is None else scale / 2


class LogWindow:
    """An observer that updates the metrics after each step. ``values`` returns those since the last call.

    ``keeper`` is passed to the step function; it is None without metrics. With several ranks, each rank must have a
    LogWindow. Their values are joined when ``every``, the interval of the first rank's log, is due.
    """

    def __init__(self, metrics: MetricSet, world: World = SOLO, every: Every | None = None) -> None:
        assert (world.size > 1) == (every is not None)
        self._metrics = metrics
        self._world = world
        self._every = every
        self._logged = LoggedMeans()
        self._has_seen = False
        self._joined: dict[str, float] = {}
        self.keeper = metrics.keeper if metrics else None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Receive the values of ``tw.log`` within the block."""
        with collecting(self._logged):
            yield

    def observe(self, result: StepResult, state: TrainState) -> None:
        if self.keeper is not None:
            self._update(result)
        if self._every is not None and (self._every.due(state) or result.step == 1):
            self._joined = self._taken()

    def _update(self, result: StepResult) -> None:
        assert self.keeper is not None
        seen, micro = self.keeper.pop(), result.batch.micro
        if len(seen) == len(micro):  # without samples of its own, a rank repeats others, which do not count
            seen = [each for each, of in zip(seen, micro) if of.size]
        if seen and not (
            result.skipped.device.type == "cpu" and bool(result.skipped)
        ):  # outputs of a skipped step are rarely finite
            self._metrics.update(seen)
            self._has_seen = True

    def values(self) -> Mapping[str, float]:
        """Return means and metrics over the steps since the last call; with several ranks, up to the last due step."""
        joined, self._joined = self._joined, {}
        return self._taken() if self._every is None else joined

    def shown(self) -> Mapping[str, Loggable]:
        return self._logged.pop_shown()

    def _taken(self) -> dict[str, float]:
        values = self._logged.pop(self._world)
        if self.keeper is not None and (self._has_seen or self._world.size > 1):
            self._has_seen = False
            values |= self._metrics.compute(self._world)
        return values

    def close(self) -> None: ...
