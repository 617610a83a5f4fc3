"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import ranks_of, since


@check(
    stage="backward",
    severity="critical",
    confidence=0.95,
    needs=RanksFacts,
    explains=("ranks.replicas_diverged", "ranks.gradients_differ"),
    points_at="backward",
)
def no_sync_at_boundary(run: RunContext) -> Iterator[Result]:
    """The last micro-batch of a step runs its forward pass inside of `no_sync()`, so nothing is exchanged.

    How it is detected: gradients differ between the ranks, and the last forward call through DistributedDataParallel
    was inside of `no_sync()`.

    Usual cause: `no_sync()` around all micro-batches, or around those of the short step at the end of an epoch.

    Looks like: ranks.ddp_bypassed.

    Fix: leave `no_sync()` for the forward and backward pass of the last micro-batch of each step.
    """
    facts = ranks_of(run)
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    if differing is not None and exchange is not None and exchange.wrapped_calls and not exchange.last_synced:
        yield run.finding(
            max(1, facts.newest),
            symptom=f"gradients differ between the ranks, {since(differing)}: the last forward call was inside "
            "no_sync()",
            since_step=differing.step,
            evidence=[("forward calls outside of no_sync in that step", exchange.synced_calls, 1)],
        )
