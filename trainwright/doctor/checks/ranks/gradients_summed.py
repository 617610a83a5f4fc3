"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import ranks_of


@check(stage="backward", needs=RanksFacts, points_at="step")
def gradients_summed(run: RunContext) -> Iterator[Result]:
    """Gradients are summed over the ranks, of losses that are means, and are not divided by the number of ranks.

    Why it matters: the learning rate is in effect multiplied by the number of ranks.

    How it is detected: the bits of each gradient before and after `all_reduce` with SUM, and at the update; the loss is
    a mean that nothing divides by the number of ranks.

    Exceptions: models that are divided among the ranks.

    Usual cause: `dist.all_reduce(p.grad)` without a division.

    Fix: `op=ReduceOp.AVG`, or divide each gradient by the number of ranks.
    """
    facts = ranks_of(run)
    if facts.summed_since is not None:
        yield run.finding(
            max(1, facts.newest),
            symptom=f"the gradients are sums over {facts.size} ranks, of losses that are means over a batch",
            since_step=facts.summed_since,
            evidence=[("gradient at the update / result of the all_reduce", 1.0, 1.0 / facts.size)],
        )
