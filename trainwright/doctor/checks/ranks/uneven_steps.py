from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.ranks import RanksFacts


@check(
    stage="input",
    severity="critical",
    confidence=0.95,
    explains=("ranks.stalled", "ranks.replicas_diverged", "ranks.gradients_differ"),
)
def uneven_steps(run: RunContext, facts: RanksFacts) -> Results:
    """A rank ended its loop while others are in a later step and wait for it.

    How it is detected: each rank reports its step. One has finished before a step in which another waits or has failed.

    Usual cause: the ranks have different numbers of batches, or one skips a step.

    Looks like: ranks.stalled, where the rank is still in its loop.

    Fix: `DistributedSampler(dataset, drop_last=True)`, or train inside of
    `with torch.distributed.algorithms.Join([ddp]):`.

    Sources: Automodel PR 2468.
    """
    for early in facts.ended_early[:1]:
        longest = max(each.begun for each in facts.statuses)
        yield run.finding(
            max(1, longest),
            symptom=f"rank {early.rank} ended after {early.step} steps, and others wait for it in step {longest}",
            since_step=longest,
            where=Where(rank=early.rank),
            evidence=[("steps by rank", [each.step for each in facts.statuses])],
        )
