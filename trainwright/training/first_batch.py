"""Measures the first batch: a dry run in each open precision and number of threads, and the wait for workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from torch import Tensor

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import World
from trainwright.distributed.group import from_first_rank
from trainwright.distributed.memory import rlimits
from trainwright.engine.dry_run import DryRun, Mode, dry_run
from trainwright.engine.loss import Loss
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.errors import DataError
from trainwright.plan.make import RunFacts, candidates, choose_mode
from trainwright.plan.run_time import ReadingPace


def try_batch(
    state: TrainState,
    batch: StepBatch,
    loss: Callable[..., Loss | Tensor],
    precision_of: Callable[[PrecisionName], Precision],
    facts: RunFacts,
    requested: str | None,
    world: World,
) -> DryRun:
    """Run ``batch`` in each candidate mode (precision and number of threads) and return the measurements.

    Precisions are compared with one thread each. Numbers of threads are compared in the first precision. The chosen
    combination is then timed as well. If several ranks compute together (``world``), the first rank chooses the modes.
    ``state`` is unchanged afterwards. ``requested`` is the precision in the recipe; None if it is not set.
    """
    names = candidates(requested, facts.device, facts.low_precision)
    if rlimits():  # oneDNN compiles bf16 code for each shape and kills the process if it cannot allocate memory for it
        names = names[:1]
    tried = [(names[0], count) for count in facts.threads]
    tried += [(name, 1) for name in (names if len(names) > 1 else ()) if (name, 1) not in tried]

    def run(modes: list[tuple[PrecisionName, int]]) -> DryRun:
        made = [Mode(precision_of(name), count) for name, count in modes]
        return dry_run(state, batch, loss, modes=made, world=world)

    seen = run(from_first_rank(world, tried))
    chosen = from_first_rank(world, choose_mode(requested, facts, seen.seconds, seen.thread_s))
    if chosen in seen.seconds:
        return seen
    return replace(seen, seconds={**seen.seconds, **run([chosen]).seconds})


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
    as in a real step. Batches that the workers had ready before the measurement (``workers`` times ``prefetch``
    micro-batches) do not count. The batches of at most ``most`` steps are read. If no other batch arrives in time, the
    wait is estimated from the time to read a batch. The DataError of an unreadable batch is raised when the stream
    reaches it, so the batches before it are trained on.
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
