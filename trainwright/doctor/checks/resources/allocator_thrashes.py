from itertools import pairwise

from trainwright.doctor import Results, RunContext, check
from trainwright.runs.records import Telemetry

MIN_FLUSHES_PER_STEP = 0.25  # Fewer may come from a single large batch
MIN_CONSECUTIVE_INTERVALS = 3


@check(stage="forward")
def allocator_thrashes(run: RunContext) -> Results:
    """The allocator of the GPU flushes its cache again and again, and waits for the device each time.

    How it is detected: the allocator's counter of retries is read four times. Between each two readings it rises by at
    least one retry for every four steps.

    Exceptions: some flushes in the first steps, at an evaluation, or after a step that ran out of memory.

    Usual cause: the memory is nearly full, or its free blocks are too small (fragmentation).

    Fix: a smaller micro-batch; `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; samples of similar length, or padded
    to a few lengths.

    Sources: pytorch/pytorch #35901, #193195.
    """
    read = [each for each in run.records if isinstance(each, Telemetry)]
    for name in sorted({name for each in read for name in each.values if name.endswith("/allocator_retries")}):
        seen = [(each.step, each.values[name]) for each in read if name in each.values]
        flushes = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(seen)][-MIN_CONSECUTIVE_INTERVALS:]
        steps, count = sum(each[0] for each in flushes), sum(each[1] for each in flushes)
        if len(flushes) == MIN_CONSECUTIVE_INTERVALS and all(
            num > 0 and some >= MIN_FLUSHES_PER_STEP * num for num, some in flushes
        ):
            yield run.finding(
                seen[-1][0],
                since_step=seen[-1][0] - steps + 1,
                symptom=f"the allocator flushed its cache {count:.0f} times in {steps} steps",
                evidence=[("flushes of the allocator's cache in a step", round(count / steps, 3), 0)],
            )
