from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.ranks import RanksFacts, one_rank, since, trains_locally


@check(
    names_cause=False,
    stage="backward",
    severity="critical",
    explains=("ranks.replicas_diverged",),
    points_at="backward",
)
def gradients_differ(run: RunContext, facts: RanksFacts) -> Results:
    """The ranks update their weights with different gradients, so the replicas drift apart.

    How it is detected: checksums of the gradients at the update differ between the ranks; or the ranks of a sharded
    model (FSDP) scale their shards by different factors.

    Exceptions: models that are divided among the ranks, as in ranks.replicas_diverged; ranks that train separately and
    synchronize their weights between updates (local SGD). Ranks that never exchange gradients are reported from step 16
    on.

    Usual cause: gradients are not averaged over the ranks, or clipping, unscaling or a hook changes those of one rank.

    Looks like: ranks.ddp_does_not_exchange, which names the cause.

    Fix: call the model through DistributedDataParallel, or all-reduce every gradient and divide by the number of ranks.
    Clip by the norm over all shards: `model.clip_grad_norm_(1.0)` with FSDP1, `torch.nn.utils.clip_grad_norm_` with
    `fully_shard`.
    """
    if reason := trains_locally(run, facts):
        yield NotApplicable(reason)
        return
    differing, factors = facts.disagreement("gradients"), facts.factors
    if differing is not None:
        yield run.finding(
            max(1, facts.newest),
            symptom=f"the ranks update with different gradients, {since(differing)}",
            cause="they were the same after the averaging: clipping, unscaling or a hook changes them on one rank"
            if facts.are_changed_apart
            else "the gradients of this step were not averaged over the ranks",
            since_step=differing.step,
            where=one_rank(differing.ranks),
            evidence=[("parameters whose gradients differ", list(differing.names), [])],
        )
    elif factors:
        yield run.finding(
            max(1, facts.newest),
            symptom="the ranks scale their shards of the gradients by different factors before the update: "
            + ", ".join(f"{each:.3g}" for each in factors[:8]),
            cause="the clipping norm or the loss scale is that of one shard instead of all shards",
            since_step=facts.factors_since,
            evidence=[("factor by rank", [round(each, 6) for each in factors])],
        )
