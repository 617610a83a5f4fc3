"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import in_ranks
from trainwright.runlog.records import Where


@check(stage="update", severity="critical", needs=RanksFacts)
def silent_corruption(run: RunContext) -> Iterator[Result]:
    """A number in the weights of one rank changed although no update changed it.

    How it is detected: all ranks made the same updates from the same gradients, and the weights of one differ; or a
    parameter changed by one bit between two updates.

    Usual cause: memory or processor of that machine is defective; it will happen again.

    Looks like: ranks.replicas_diverged, where code writes to several weights of one rank.

    Fix: take weights and optimizer state of another rank or the last checkpoint; test that machine and its GPU
    (`dcgmi diag -r 3`), and leave it out.

    Sources: Llama 3, section 3.3.4; arXiv 2605.04213.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    differing = facts.disagreement("weights")
    changed = [(each.rank, change) for each in facts.statuses for change in each.changes]
    ranks = {rank for rank, _ in changed}
    alone = changed if len(ranks) == 1 and len(facts.statuses) > 1 else []
    if differing is None or differing.agreed < 0 or facts.writers:
        return
    gradients = facts.disagreement("gradients")
    if gradients is not None and gradients.step <= differing.step:
        return
    if facts.disagreement("hyperparameters") is not None or facts.disagreement("micro_batches") is not None:
        return
    guilty = [alone[0][0]] if alone else list(differing.ranks)
    is_flip = differing.one_bit or any(change.one_bit for _, change in alone)
    moments = facts.disagreement("moments")
    has_other_moments = not alone and moments is not None and moments.step <= differing.step
    if has_other_moments or not (guilty or is_flip):
        return
    at = alone[0][1] if alone else None
    name = at.parameter if at else next(iter(differing.names), "a weight")
    yield run.finding(
        max(1, facts.newest),
        symptom=f"{name} of {in_ranks(guilty) if guilty else 'a rank'} changed by itself"
        + (f" after the update of step {at.step}" if at else f" between steps {differing.agreed} and {differing.step}")
        + (", by one bit" if is_flip else ""),
        cause="all ranks made the same updates from the same gradients: a memory or a processor has changed a number"
        if is_flip
        else "all ranks made the same updates from the same gradients: the machine computes wrongly, or the code of "
        "this rank writes to its weights",
        remedy="take weights and optimizer state of another rank or the last checkpoint; test that machine and its GPU "
        "(dcgmi diag -r 3), and leave it out",
        sure=0.95 if is_flip else 0.6,
        stage="update",
        since_step=at.step if at else differing.step,
        where=Where(rank=guilty[0] if len(guilty) == 1 else None, module=name.rpartition(".")[0]),
        evidence=[("one bit differs", is_flip, False)],
        explains=("ranks.replicas_diverged", "ranks.gradients_differ"),
    )
