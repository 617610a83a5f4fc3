"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import since


@check(stage="forward", severity="critical", needs=RanksFacts)
def ddp_bypassed(run: RunContext) -> Iterator[Result]:
    """The module inside of DistributedDataParallel is called, so no gradient is exchanged.

    How it is detected: gradients differ between the ranks, and no forward call with gradients went through the wrapper.

    Usual cause: the loop calls `ddp.module(x)`.

    Looks like: ranks.no_sync_at_boundary. Evaluation through `ddp.module` is right.

    Fix: call `ddp(x)`; for another method than forward, give the module a forward that calls it.

    Sources: minimind #853, OpenTSLM #49, openvla-oft #160.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    if differing is None or exchange is None or exchange.wrapped_calls or not facts.is_wrapped:
        return
    yield run.finding(
        max(1, facts.newest),
        symptom=f"gradients differ between the ranks, {since(differing)}: no forward call went through "
        "DistributedDataParallel",
        cause="the loop calls the module inside (ddp.module(x)), so no gradient is exchanged",
        remedy="call the DistributedDataParallel object itself: ddp(x)",
        sure=0.95,
        stage="forward",
        since_step=differing.step,
        evidence=[("forward calls of the model in that step, through the wrapper", 0, exchange.calls)],
        explains=("ranks.replicas_diverged", "ranks.gradients_differ"),
    )
