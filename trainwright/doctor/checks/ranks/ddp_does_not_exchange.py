from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.ranks import RanksFacts, since


@check(
    stage="backward",
    severity="critical",
    confidence=0.95,
    explains=("ranks.replicas_diverged", "ranks.gradients_differ", "ranks.unused_parameters"),
    points_at="backward",
)
def ddp_does_not_exchange(run: RunContext, facts: RanksFacts) -> Results:
    """DistributedDataParallel wraps the model, but does not average its gradients over the ranks.

    How it is detected: the gradients differ between the ranks, and the forward calls of the step bypassed the wrapper,
    or the last one was inside of `no_sync()`; if neither is true, parameters were replaced. Or the wrapper finds the
    same parameters without a gradient on every rank.

    Usual cause: the loop calls `ddp.module(x)`; `no_sync()` is around the last micro-batch of a step; or parameters
    were replaced after wrapping, by `.to()`, `.half()`, a new head or tied weights.

    Looks like: ranks.unused_parameters, where one rank alone has no gradients. Using `ddp.module` in an evaluation is
    correct.

    Fix: call `ddp(x)`; run forward and backward of the last micro-batch outside of `no_sync()`; move, cast and change
    the model first, then wrap it.

    Sources: minimind #853, OpenTSLM #49, openvla-oft #160, pytorch/pytorch #104336.
    """
    differing, exchange = facts.disagreement("gradients"), facts.exchange
    unused = {each.unused for each in facts.statuses}
    misses_same = len(facts.statuses) > 1 and len(unused) == 1 and unused != {()} and not facts.missing
    cause = remedy = ""
    if misses_same:
        cause, remedy = "parameters were replaced after wrapping", "change the model first, then wrap it"
    elif differing is not None and exchange is not None and facts.is_wrapped:
        if not exchange.wrapped_calls:
            cause = "the loop calls the module inside of the wrapper (ddp.module(x))"
            remedy = "call the DistributedDataParallel object itself: ddp(x)"
        elif not exchange.last_synced:
            cause = "the last forward call of the step was inside of no_sync()"
            remedy = "run forward and backward of the last micro-batch of each step outside of no_sync()"
        elif not facts.missing and not facts.are_changed_apart:
            cause = "parameters were moved or replaced after wrapping: its hooks belong to the old ones"
            remedy = "move and change the model first, then wrap it"
    if cause:
        yield run.finding(
            max(1, facts.newest),
            symptom="DistributedDataParallel does not average the gradients"
            + (f", {since(differing)}" if differing else ""),
            cause=cause,
            remedy=remedy,
            since_step=differing.step if differing else None,
            evidence=[
                ("forward calls through the wrapper", exchange.wrapped_calls if exchange else None),
                ("forward calls through the wrapper outside of no_sync()", exchange.synced_calls if exchange else None),
            ],
        )
