"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import ranks_of, since


@check(
    stage="forward",
    severity="critical",
    confidence=0.95,
    needs=RanksFacts,
    explains=("ranks.replicas_diverged", "ranks.gradients_differ"),
)
def ddp_bypassed(run: RunContext) -> Iterator[Result]:
    """The module inside of DistributedDataParallel is called, so no gradient is exchanged.

    How it is detected: gradients differ between the ranks, and no forward call with gradients went through the wrapper.

    Usual cause: the loop calls `ddp.module(x)`.

    Looks like: ranks.no_sync_at_boundary. Evaluation through `ddp.module` is right.

    Fix: call `ddp(x)`; for another method than forward, give the module a forward that calls it.

    Sources: minimind #853, OpenTSLM #49, openvla-oft #160.
    """
    facts = ranks_of(run)
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    if differing is not None and exchange is not None and facts.is_wrapped and not exchange.wrapped_calls:
        yield run.finding(
            max(1, facts.newest),
            symptom=f"gradients differ between the ranks, {since(differing)}: no forward call went through "
            "DistributedDataParallel",
            since_step=differing.step,
            evidence=[("forward calls of the model in that step, through the wrapper", 0, exchange.calls)],
        )
