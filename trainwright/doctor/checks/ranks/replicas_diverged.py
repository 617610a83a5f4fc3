"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import Disagreement, RanksFacts
from trainwright.doctor.finding import Finding, listed
from trainwright.doctor.shared_ranks import in_ranks, one_rank, since


def _written_to(run: RunContext, facts: RanksFacts, first: Disagreement) -> Finding:
    """The code of one rank has written to its weights outside of an update."""
    ranks = sorted(facts.writers)
    return run.finding(
        max(1, facts.newest),
        symptom=f"the weights of {in_ranks(ranks)} changed after the update of step {facts.writers[ranks[0]]}, and "
        "those of the others did not",
        cause="the code of this rank alone writes to its weights: a checkpoint that is loaded, averaged weights that "
        "are put in their place, a reset",
        remedy="let every rank do the same, or broadcast weights and optimizer state of rank 0 afterwards",
        sure=0.9,
        stage="input",
        since_step=facts.writers[ranks[0]],
        where=one_rank(ranks),
        evidence=[("parameters that differ", list(first.names), [])],
        explains=("ranks.gradients_differ",),
    )


@check(names_cause=False, stage="buffers", severity="critical", needs=RanksFacts)
def replicas_diverged(run: RunContext) -> Iterator[Result]:
    """The ranks no longer have the same weights, moments, buffers, hyperparameters or number of micro-batches.

    Why it matters: each rank trains a model of its own, and averaging gradients of different models trains none of
    them.

    How it is detected: checksums of the bits are compared at steps 1, 2, 3, 4, 6, 8, 12, 16, 24 and every 32nd. A
    replica is inferred: a parameter that begins equal, or whose gradients are equal at the update.

    Exceptions: shards, of which ranks begin with other values and make other gradients, beside parameters that are the
    same (tensor and expert parallelism); DTensors; moments that one rank keeps for all; running statistics of norms.

    Usual cause: each rank made its own weights; a learning rate, a load or a reset on one rank alone.

    Looks like: ranks.gradients_differ, resources.silent_corruption. Local SGD diverges on purpose between two averages.

    Fix: wrap the model in DistributedDataParallel, or broadcast the weights of rank 0; later, fix the cause and restore
    all ranks from one checkpoint.

    Sources: minimind #853, OpenTSLM #49, openvla-oft #160.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    order = ("hyperparameters", "micro_batches", "buffers", "moments", "weights")
    broken = [each for each in facts.disagreements if each.what in order]
    if not broken:
        return
    first = min(broken, key=lambda each: (each.step, order.index(each.what)))
    if facts.writers and first.what in ("moments", "weights"):
        yield _written_to(run, facts, first)
        return
    names = f" ({listed(first.names)})" if first.names else ""
    at_begin = first.what in ("weights", "buffers") and first.agreed < 0 and first.step == 0
    has_other_gradients = at_begin or first.what == "micro_batches"
    who = f": {in_ranks(first.ranks)} differ from the others" if first.ranks else ""
    yield run.finding(
        max(1, facts.newest),
        symptom=f"the ranks do not have the same {first.what.replace('_', '-')}{names}, {since(first)}{who}",
        cause="each rank made its own weights, and nothing gave all of them those of one"
        if at_begin
        else f"every rank makes the same updates only from the same {first.what.replace('_', '-')}",
        remedy="wrap the model in DistributedDataParallel, or broadcast weights and buffers of rank 0 before training"
        if at_begin
        else "see which finding explains it; then restore all ranks from one checkpoint",
        sure=0.95 if facts.is_wrapped or at_begin else 0.8,
        stage="buffers" if not at_begin else "input",
        since_step=max(1, first.step),
        where=one_rank(first.ranks),
        evidence=[
            (f"{each.what}: first step that differs", each.step, None if each.agreed < 0 else f"same in {each.agreed}")
            for each in broken
        ],
        explains=("ranks.gradients_differ",) if has_other_gradients else (),
    )
