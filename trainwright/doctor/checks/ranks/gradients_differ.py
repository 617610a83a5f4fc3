"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.finding import Finding
from trainwright.doctor.shared_ranks import one_rank, since


def _same_factor(run: RunContext, facts: RanksFacts) -> Iterator[Finding]:
    """Of ranks that hold parts of the gradients: what all parts are multiplied by is one number."""
    if facts.factors_since is None:
        return
    numbers = ", ".join(f"{each:.3g}" for each in facts.factors[:8])
    yield run.finding(
        max(1, facts.newest),
        symptom=f"each rank multiplies its part of the gradients by another number before the update: {numbers}",
        cause="the norm that clips, or the scale, is that of the part of one rank and not of all parts",
        remedy="use torch.nn.utils.clip_grad_norm_ on the sharded parameters, or sum the squared norms over the ranks",
        sure=0.9,
        stage="backward",
        since_step=facts.factors_since,
        evidence=[("factor by rank", [round(each, 6) for each in facts.factors])],
    )


@check(names_cause=False, stage="backward", severity="critical", needs=RanksFacts)
def gradients_differ(run: RunContext) -> Iterator[Result]:
    """The ranks update their weights with different gradients, so the replicas drift apart.

    How it is detected: checksums of the gradients at the update, as they differ; of shards (FSDP) the number by which
    each rank multiplies its part.

    Exceptions: shards, as in ranks.replicas_diverged.

    Usual cause: gradients are not combined over the ranks, or clipping, unscaling or a hook changes them on one rank
    alone.

    Looks like: ranks.ddp_bypassed, ranks.no_sync_at_boundary, ranks.stale_buckets, which say why.

    Fix: call the model through DistributedDataParallel, or all-reduce every gradient and divide by the ranks; clip by
    the norm of all parts (`clip_grad_norm_`).
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    differing = facts.disagreement("gradients")
    if differing is None:
        yield from _same_factor(run, facts)
        return
    is_late = facts.are_changed_apart
    yield run.finding(
        max(1, facts.newest),
        symptom=f"the ranks update with different gradients, {since(differing)}",
        cause="they were the same after the exchange: what changes them before the update (clipping, unscaling, hooks) "
        "is not the same on all ranks"
        if is_late
        else "the gradients of this step were not combined over the ranks",
        remedy="do the same with the gradients on every rank"
        if is_late
        else "call the model through DistributedDataParallel, or all-reduce every gradient and divide by the ranks",
        sure=0.9,
        stage="backward",
        since_step=differing.step,
        where=one_rank(differing.ranks),
        evidence=[("parameters whose gradients differ", list(differing.names), [])],
        explains=("ranks.replicas_diverged",),
    )
