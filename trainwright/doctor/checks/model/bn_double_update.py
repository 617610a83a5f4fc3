import math

from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.layers import LayersFacts


@check(stage="buffers", confidence=0.95)
def bn_double_update(run: RunContext, exams: Every[LayersFacts]) -> Results:
    """BatchNorm updates its running statistics more often than the forward pass ran.

    How it is detected: the change of `num_batches_tracked` in an examined step is larger than the number of calls in
    the forward pass.

    Exceptions: a momentum of 1 - sqrt(0.9), which compensates for it.

    Usual cause: activation checkpointing runs the forward pass again in backward, which updates them once more.

    Fix: leave BatchNorm out of the checkpointed part, or `bn.momentum = 1 - math.sqrt(1 - 0.1)`.

    Sources: pytorch/pytorch#96136.
    """
    step, now = exams[-1]
    for path, seen in now.norms.items():
        if seen.updates > seen.calls > 0 and abs(seen.momentum - (1 - math.sqrt(0.9))) > 5e-3:
            yield run.finding(
                step,
                symptom=f"{seen.calls} forward passes update the statistics of {path} {seen.updates} times",
                where=Where(module=path, op="batch_norm"),
                evidence=[("updates of its statistics in a step", seen.updates, seen.calls)],
            )
