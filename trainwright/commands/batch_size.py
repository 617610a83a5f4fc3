"""``batch-size RECIPE``: finds the largest micro-batch that trains without running out of memory, by training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from trainwright.assembly.assemble import Parts, build_loading, training_batches, validation_sets
from trainwright.checkpoint.checkpoint import tensors_of
from trainwright.checkpoint.cursor import Cursor
from trainwright.checkpoint.staging import Staging
from trainwright.data.ready_batches import ReadyBatches
from trainwright.data.unwrap import length_of
from trainwright.distributed.memory import (
    adapt_to_limits,
    capacity_bytes,
    give_back,
    lowered_limits,
    peak_bytes,
    rlimits,
    start_peak,
)
from trainwright.engine.evaluate import evaluate
from trainwright.engine.step import clear_grads
from trainwright.errors import OutOfMemoryError, UsageError
from trainwright.plan.batch import batch_of
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import Loaded
from trainwright.training.job import Job, make_advance, prepare

STEPS_PER_SIZE = 3
"""The first step allocates the optimizer state, the second uses it, the third starts from the memory after that."""
FIRST_SIZE = 8
"""Samples."""
PRECISION = 16
"""The result is within a sixteenth of the limit."""
MIN_PEAK_GROWTH = 0.02
"""Relative growth of the peak between two sizes that is distinguishable from noise."""


@dataclass(frozen=True)
class SizeTried:
    """Some steps with ``micro`` samples per micro-batch, and an evaluation. ``peak_bytes`` None: out of memory."""

    micro: int
    peak_bytes: int | None
    samples_per_s: float | None


@dataclass(frozen=True)
class LargestBatch:
    """The result of the search.

    Attributes:
        most: The largest size that was trained and needed at most ``allowed_bytes``.
        micro: The largest divisor of the recipe's global batch that is at most ``most``.
        batch: The global batch size of the recipe.
        capacity_bytes: The memory that may be used.
        allowed_bytes: ``capacity_bytes`` without the margin.
        tried: The sizes that were trained.
        bounded: The reason for the end of the search if it was not memory, else "".
    """

    most: int
    micro: int
    batch: int
    capacity_bytes: int
    allowed_bytes: int
    tried: tuple[SizeTried, ...]
    bounded: str

    def to_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {**vars(self), "tried": [vars(each) for each in self.tried]}

    def lines(self) -> list[str]:
        """Return the text output."""
        rows = [
            f"  {each.micro:>8,}  "
            + (
                f"{each.peak_bytes / 2**30:8.3f} GiB  {each.samples_per_s:10,.0f} samples/s"
                if each.peak_bytes is not None and each.samples_per_s is not None
                else "out of memory"
            )
            for each in sorted(self.tried, key=lambda each: each.micro)
        ]
        accumulation = self.batch // self.micro
        return [
            " micro-batch       peak         speed",
            *rows,
            f"largest      {self.most:,} samples: within {self.allowed_bytes / 2**30:.3f} GiB, of "
            f"{self.capacity_bytes / 2**30:.3f} GiB that may be used" + (f"; {self.bounded}" if self.bounded else ""),
            f"for a batch of {self.batch:,}: --set batch.micro={self.micro} (accumulation {accumulation})",
        ]


def find_batch_size(
    loaded: Loaded,
    parts: Parts | None = None,
    *,
    margin: float = 0.1,
    most: int | None = None,
    memory_bytes: int | None = None,
    budget_s: float = 120.0,
    say: Callable[[str], None] = lambda _line: None,
) -> LargestBatch:
    """Train a few steps at sizes that double while they fit, then at sizes in between.

    Each size is trained on real batches with the optimizer state, the copy of a checkpoint, and an evaluation between
    its steps. A limit of the process is lowered by the margin during the search, because the peak does not show
    everything that such a limit counts.

    Args:
        loaded: The recipe.
        parts: Live objects instead of those that the recipe names. They are trained and must not be used afterwards.
        margin: Fraction of the memory that stays free, because samples may be longer than those of the search.
        most: The maximum size. Default: the size of the dataset.
        memory_bytes: The memory to use. Default: all that is free.
        budget_s: Seconds for the search. No size is started that would exceed it.
        say: Receives lines on progress.

    Raises:
        OutOfMemoryError: One sample does not fit.
        UsageError: The data are already batched.
    """
    if parts is not None and (parts.train.own_batches is not None or isinstance(parts.train.dataset, ReadyBatches)):
        raise UsageError("the data are already batched, so their size is fixed", remedy="pass the Dataset itself")
    if not 0 <= margin < 1:
        raise UsageError(f"--margin {margin:g} is not a fraction of the memory", remedy="give 0.1 for a tenth")
    if not budget_s > 0:
        raise UsageError(f"--budget {budget_s:g} is not a time", remedy="give seconds, such as 60")
    batch = batch_of(loaded.recipe.batch, None).size
    small = loaded.recipe.batch.model_copy(update={"size": batch, "micro": min(2, batch), "accumulation": None})
    job = prepare(in_one_process(replace(loaded, recipe=loaded.recipe.model_copy(update={"batch": small}))), parts)
    adapt_to_limits()  # a run with the resulting size is short of memory, even if this job is not
    capacity = min(capacity_bytes(job.device), memory_bytes or sys.maxsize)
    search = _Search(job, capacity, margin, time.perf_counter() + budget_s, say)
    found = search.run(min(most or sys.maxsize, _samples(job)))
    if not found:
        raise OutOfMemoryError(
            f"one sample takes more than {search.allowed / 2**30:.3g} GiB, of {capacity / 2**30:.3g} GiB in all",
            remedy="model.activation_checkpointing: block, precision: bf16, an optimizer with less state, a smaller "
            "model, or a device with more memory",
        )
    micro = max(size for size in range(1, min(found, batch) + 1) if batch % size == 0)
    return LargestBatch(found, micro, batch, capacity, search.allowed, tuple(search.tried), search.bounded)


def _samples(job: Job) -> int:
    return length_of(job.parts.train.dataset) or sys.maxsize


class _Search:
    """Searches the largest size. Peaks are affine in the size, so two of them predict the limit; predictions are
    trained.
    """

    def __init__(self, job: Job, capacity: int, margin: float, deadline_s: float, say: Callable[[str], None]) -> None:
        self.job = job
        self._margin = margin
        self._deadline_s = deadline_s
        self._say = say
        self._capacity, self.allowed = capacity, int(capacity * (1 - margin))
        self.tried: list[SizeTried] = []
        self.bounded = ""
        self._step = make_advance(job)
        self._staging = Staging()
        self._last_s = 0.0  # seconds per sample in the last trial

    def run(self, bound: int) -> int:
        """Return the largest size that fits, 0 if none does."""
        fits, too_large = 0, bound + 1
        size = min(FIRST_SIZE, bound)
        while fits + max(1, fits // PRECISION) <= too_large - 1 or not self.tried:
            if fits and time.perf_counter() + size * self._last_s > self._deadline_s:
                self.bounded = "larger sizes would have exceeded --budget"
                break
            if self._fits(size):
                fits = size
            else:  # out of memory shows the limit; subtract the margin unless the limit was lowered before
                ran_out = self.tried[-1].peak_bytes is None and not rlimits()
                too_large = max(1, int(size * (1 - self._margin))) if ran_out else size
                fitting = [each.micro for each in self.tried if each.peak_bytes is not None and each.micro < too_large]
                fits = max(fitting, default=0)
            size = self._next(fits, too_large)
            if not fits < size < too_large:
                break
        if fits == bound and not self.bounded:
            self.bounded = "larger sizes were not requested"
        return fits

    def _fits(self, size: int) -> bool:
        begin_s = time.perf_counter()
        with lowered_limits(self._capacity - self.allowed):
            tried = self._trial(size)
        self._last_s = (time.perf_counter() - begin_s) / size
        self.tried.append(tried)
        if tried.peak_bytes is None:
            self._say(f"{size:,} samples: out of memory")
            return False
        self._say(f"{size:,} samples: {tried.peak_bytes / 2**30:.3f} GiB, {tried.samples_per_s:,.0f} samples/s")
        return tried.peak_bytes <= self.allowed

    def _next(self, fits: int, too_large: int) -> int:
        """Return twice the size if that is predicted to fit, else the predicted size; halfway without a prediction."""
        predicted = self._predict()
        if predicted is None:
            return min(2 * fits, too_large - 1) if fits else too_large // 2
        halfway = (fits + too_large) // 2
        if not fits < predicted:
            return halfway
        is_refuted = predicted >= too_large and any(each.micro >= too_large for each in self.tried)
        return min(predicted, 2 * fits if fits else predicted, halfway if is_refuted else too_large - 1)

    def _predict(self) -> int | None:
        """Return the size whose peak is the allowed one, on the line through the two largest sizes that fit."""
        seen = sorted((each.micro, each.peak_bytes) for each in self.tried if each.peak_bytes is not None)[-2:]
        if len(seen) < 2 or seen[1][1] < (1 + MIN_PEAK_GROWTH) * seen[0][1]:
            return None
        (few, least), (many, most) = seen
        return few + int((self.allowed - least) * (many - few) / (most - least))

    def _trial(self, size: int) -> SizeTried:
        job, device = self.job, self.job.device
        clear_grads(job.state.optimizer)
        give_back(device)
        start_peak(device)
        loading = replace(build_loading(job.parts, job.recipe, job.plan, device), workers=0)
        loading = replace(loading, batch_size=size, micro_size=size, drop_last=True, order=None)
        validation = next(iter(validation_sets(job.parts, job.recipe.evaluation, loading).values()), None)
        step_s = 0.0
        try:
            for number, batch in enumerate(islice(training_batches(job.parts, loading, Cursor()), STEPS_PER_SIZE)):
                job.state.micro_limit, begin_s = None, time.perf_counter()
                result = self._step(job.state, batch)
                if result.oom_reports:
                    return SizeTried(size, None, None)
                float(result.loss)  # synchronizes the device
                step_s = time.perf_counter() - begin_s
                if number == 0 and job.recipe.checkpoint.asynchronous:
                    with suppress(MemoryError, RuntimeError):  # a run does without the copy then, too
                        self._staging.reserve(tensors_of(job.state))
                if number == 1 and validation is not None:
                    evaluate(job.state.model, job.parts.loss, islice(validation, 1), precision=job.precision)
        except OutOfMemoryError:
            return SizeTried(size, None, None)
        return SizeTried(size, peak_bytes(device), size / step_s)
