"""Times how long a step waits for its data, before the first step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain

from trainwright.checkpoint.cursor import StepBatch
from trainwright.errors import DataError
from trainwright.plan.reading import ReadingPace

BUDGET_S = 0.3
"""Time for the measurement, where more than the fewest steps would fit into it."""
LIMIT_S = 1.5
"""Time after which it ends in any case."""
KEPT_BYTES = 2**26
"""The most memory of batches that are read ahead for it. They are trained on afterwards."""
FEWEST, MOST = 2, 4
"""Steps to measure."""


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
    """Takes batches at the pace of steps of ``compute_s`` seconds; returns the pace and a stream of the same batches.

    The training process is kept busy for ``compute_s`` between two batches, as in a step, so it competes with the
    workers for cores. Batches that the workers had ready before do not count: ``workers`` times ``prefetch``
    micro-batches. At most ``most`` steps are read. Where too few came in time, the wait is estimated from how long
    reading them takes. A batch that cannot be read raises its DataError where the stream comes to it, so what is before
    it is trained on.
    """
    kept: list[StepBatch] = []
    rest = batches
    waits: list[float] = []
    taken, size, begin_s = 0, 0, clock()
    while size < KEPT_BYTES and compute_s < LIMIT_S and (most is None or len(kept) < most):
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
        if elapsed_s > LIMIT_S or len(waits) >= MOST or (elapsed_s > BUDGET_S and len(waits) >= FEWEST):
            break
        _be_busy(compute_s, clock)
    read_s = statistics.fmean(batch.read_s for batch in kept[-len(waits) or None :]) if kept else 0.0
    wait_s = statistics.fmean(waits) if waits else max(0.0, read_s / max(1, workers) - compute_s)
    return ReadingPace(workers, wait_s, read_s, start_s, len(waits)), chain(kept, rest)


def _raising(error: DataError) -> Iterator[StepBatch]:
    yield from ()
    raise error


def _be_busy(seconds: float, clock: Callable[[], float]) -> None:
    """Occupies one core, as a step does."""
    end_s = clock() + seconds
    while clock() < end_s:
        pass
