from dataclasses import replace

from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.ranks import REPLAYED, RanksFacts, in_ranks, one_rank, since

CAUSES = ("hyperparameters", "micro_batches", "gradients", "moments")
"""Quantities that explain different weights if they differ in the same step or earlier."""


@check(stage="update", severity="critical", explains=("ranks.replicas_diverged", "ranks.gradients_differ"))
def silent_corruption(run: RunContext, facts: RanksFacts) -> Results:
    """A rank computes wrongly: its weights changed without an update, or other ranks cannot reproduce its gradients.

    How it is detected: all ranks made the same updates from the same gradients, and the weights of one differ; or a
    parameter changed by one bit between two updates. With `deterministic: true`, two other ranks replay the batch of
    each rank in every 256th step, before its gradients are summed. In a run of two ranks, each rank also replays its
    own batch.

    Exceptions: ranks with different processors; programs that do not compute the same bits twice.

    Usual cause: the memory or the processor of that machine is defective, so it will happen again.

    Looks like: ranks.replicas_diverged, where code writes to several weights of one rank.

    Fix: load weights and optimizer state of another rank or of the last checkpoint. Test that machine and its GPU
    (`dcgmi diag -r 3`), and do not use it until then.

    Sources: Llama 3, section 3.3.4; arXiv 2605.04213.
    """
    if (replayed := facts.disagreement(REPLAYED)) is not None:
        names = replayed.names
        who = in_ranks(replayed.ranks) if replayed.ranks else "one of the two ranks"
        yield run.finding(
            max(1, facts.newest),
            symptom=f"{who} computes wrongly: the gradient of {names[0]} differs from another rank's for the same "
            f"batch, {since(replayed)}",
            sure=0.95 if replayed.ranks else 0.8,
            since_step=replayed.step,
            where=replace(one_rank(replayed.ranks), module=names[0].rpartition(".")[0]),
            evidence=[("parameters whose gradients differ, the last layer first", list(names), [])],
        )
        return
    differing = facts.disagreement("weights")
    if differing is None or differing.agreed < 0 or facts.writers:
        return
    changed = [(each.rank, change) for each in facts.statuses for change in each.changes]
    rank, at = changed[0] if len({rank for rank, _ in changed}) == 1 and len(facts.statuses) > 1 else (None, None)
    others = [each for each in map(facts.disagreement, CAUSES[: 3 if at else 4]) if each is not None]
    if any(each.step <= differing.step for each in others):
        return
    guilty = [rank] if rank is not None else list(differing.ranks)
    is_flip = differing.one_bit or any(change.one_bit for _, change in changed if at)
    if not guilty and not is_flip:
        return
    name = at.parameter if at else next(iter(differing.names), "a weight")
    yield run.finding(
        max(1, facts.newest),
        symptom=f"{name} of {in_ranks(guilty) if guilty else 'a rank'} changed without an update"
        + (f" after the update of step {at.step}" if at else f" between steps {differing.agreed} and {differing.step}")
        + (", by one bit" if is_flip else ""),
        cause="" if is_flip else "the machine computes wrongly, or the code of this rank writes to its weights",
        sure=0.95 if is_flip else 0.6,
        since_step=at.step if at else differing.step,
        where=Where(rank=guilty[0] if len(guilty) == 1 else None, module=name.rpartition(".")[0]),
        evidence=[("exactly one bit of a value differs", is_flip)],
    )
