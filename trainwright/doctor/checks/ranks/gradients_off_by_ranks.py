from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.ranks import RanksFacts


@check(stage="backward", confidence=0.85, points_at="backward")
def gradients_off_by_ranks(run: RunContext, facts: RanksFacts) -> Results:
    """The gradients are wrong by a factor of the number of ranks: their sum is not divided by it, or divided twice.

    How it is detected: the loss is a mean. Its gradients go through `all_reduce` with SUM, and are not changed before
    the update; or the loss is divided by the number of ranks, and DistributedDataParallel takes the mean again.

    Exceptions: models that are divided among the ranks; a halved squared error with two ranks, which looks like a
    division by the number of ranks.

    Usual cause: `dist.all_reduce(p.grad)` without a division; or the loss is still divided by the number of ranks in a
    loop with DistributedDataParallel.

    Fix: `dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`, or divide each gradient by `dist.get_world_size()`. With
    DistributedDataParallel, do not divide the loss.
    """
    if facts.summed_since is not None:
        symptom = f"the gradients are summed over {facts.size} ranks and not divided by {facts.size}"
        since, seen, expected = facts.summed_since, 1.0, 1.0 / facts.size
    elif facts.shrunk_since is not None:
        symptom = f"the loss is divided by {facts.size}, and DistributedDataParallel divides by {facts.size} again"
        since, seen, expected = facts.shrunk_since, 1.0 / facts.size**2, 1.0 / facts.size
    else:
        return
    yield run.finding(
        max(1, facts.newest),
        symptom=symptom,
        since_step=since,
        evidence=[("gradient at the update / sum over the ranks", seen, expected)],
    )
