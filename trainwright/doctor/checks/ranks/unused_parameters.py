from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.ranks import RanksFacts


@check(
    stage="backward",
    severity="critical",
    confidence=0.95,
    explains=("ranks.replicas_diverged", "ranks.gradients_differ", "ranks.stalled", "ranks.uneven_steps"),
)
def unused_parameters(run: RunContext, facts: RanksFacts) -> Results:
    """On one rank some parameters have no gradient, because its loss does not depend on them; the other ranks wait for
    these gradients.

    How it is detected: parameters without a gradient at the update differ between the ranks, or the error of
    DistributedDataParallel names them.

    Exceptions: parameters that are unused on every rank; models that are divided among the ranks.

    Usual cause: a branch that depends on the data, a head that only some batches use.

    Fix: use them on every rank (add `0 * output.sum()` to the loss), or
    `DistributedDataParallel(..., find_unused_parameters=True)`.

    Sources: pytorch/pytorch #128949, #69031.
    """
    guilty = [(each.rank, each.unused) for each in facts.statuses if each.unused]
    if not guilty and facts.missing and facts.missing_on is not None:
        guilty = [(facts.missing_on, facts.missing)]
    for rank, names in guilty[:1]:
        yield run.finding(
            max(1, facts.newest),
            symptom=f"on rank {rank}, {len(names)} parameters have no gradient: {listed(names)}",
            where=Where(rank=rank, module=names[0].rpartition(".")[0]),
            evidence=[("parameters without a gradient", list(names[:16]), [])],
        )
