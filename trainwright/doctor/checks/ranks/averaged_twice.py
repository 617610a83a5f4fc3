"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import ranks_of


@check(stage="backward", confidence=0.8, needs=RanksFacts, points_at="backward")
def averaged_twice(run: RunContext) -> Iterator[Result]:
    """The loss is divided by the number of ranks, and DistributedDataParallel takes the mean again.

    Why it matters: the learning rate is in effect divided by the number of ranks.

    How it is detected: the loss is a mean, divided by the number of ranks beside that of micro-batches, and the wrapper
    exchanges the gradients.

    Exceptions: half a squared error with two ranks.

    Usual cause: a division that belongs to gradients that are summed by hand.

    Fix: leave the division by the number of ranks out of the loss.
    """
    facts = ranks_of(run)
    if facts.shrunk_since is not None:
        yield run.finding(
            max(1, facts.newest),
            symptom=f"the loss is divided by {facts.size}, and DistributedDataParallel divides by {facts.size} again",
            since_step=facts.shrunk_since,
            evidence=[("gradient at the update / mean over the ranks", 1.0 / facts.size, 1.0)],
        )
