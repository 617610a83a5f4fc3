"""Times how long a step waits for its data, before the first step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain

from trainwright.checkpoint.cursor import StepBatch
from trainwright.errors import DataError
from trainwright.plan.reading import ReadingPace

MEASUREMENT_BUDGET_S = 0.3
"""Seconds for the measurement, if the minimum number of steps is reached within them."""
MAX_MEASUREMENT_S = 1.5
"""Seconds after which the measurement ends in any case."""
MAX_READ_AHEAD_BYTES = 2**26
"""Maximum bytes of batches that are read ahead. They are trained on afterwards."""
MIN_MEASURED_STEPS = 2
MAX_MEASURED_STEPS = 4


def time_workers(
    batches: Iterator[StepBatch],
    *,
    workers: int,
    prefetch: int,
    compute_s: float,
    start_s: float,
    most: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[ReadingPace, Iterator[StepBatch]]:
    """Take batches at the pace of steps of ``compute_s`` seconds. Return the pace and a stream of the same batches.

    The training process is kept busy for ``compute_s`` between two batches, so it competes with the workers for cores
    as in a real step. Batches that the workers had ready before (``workers`` times ``prefetch`` micro-batches) do not
    count. At most ``most`` steps are read. If too few batches arrive in time, the wait is estimated from the time to
    read one. The DataError of an unreadable batch is raised when the stream reaches it, so the batches before it are
    trained on.
    """
    kept: list[StepBatch] = []
    rest = batches
    waits: list[float] = []
    taken, size, begin_s = 0, 0, clock()
    while size < MAX_READ_AHEAD_BYTES and compute_s < MAX_MEASUREMENT_S and (most is None or len(kept) < most):
        now_s = clock()
        try:
            batch = next(batches, None)
        except DataError as error:
            rest = _raising(error)
            break
        wait_s = clock() - now_s
        if batch is None:
            break
        if taken > workers * prefetch:
            waits.append(wait_s)
        kept.append(batch)
        taken += len(batch.micro)
        size += sum(tensor.nbytes for tensor in batch.tensors)
        elapsed_s = clock() - begin_s
        if (
            elapsed_s > MAX_MEASUREMENT_S
            or len(waits) >= MAX_MEASURED_STEPS
            or (elapsed_s > MEASUREMENT_BUDGET_S and len(waits) >= MIN_MEASURED_STEPS)
        ):
            break
        _be_busy(compute_s, clock)
    read_s = statistics.fmean(batch.read_s for batch in kept[-len(waits) or None :]) if kept else 0.0
    wait_s = statistics.fmean(waits) if waits else max(0.0, read_s / max(1, workers) - compute_s)
    return ReadingPace(workers, wait_s, read_s, start_s, len(waits)), chain(kept, rest)


def _raising(error: DataError) -> Iterator[StepBatch]:
    yield from ()
    raise error


def _be_busy(seconds: float, clock: Callable[[], float]) -> None:
    """Occupy one core, as a step does."""
    end_s = clock() + seconds
    while clock() < end_s:
        pass
