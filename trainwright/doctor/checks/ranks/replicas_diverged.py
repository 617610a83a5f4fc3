from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.ranks import RanksFacts, in_ranks, one_rank, since, trains_locally

CAUSES_FIRST = ("hyperparameters", "micro_batches", "buffers", "moments", "weights")
"""Quantities in causal order, root cause first."""


@check(names_cause=False, stage="buffers", severity="critical", confidence=0.95)
def replicas_diverged(run: RunContext, facts: RanksFacts) -> Results:
    """The ranks no longer have the same weights, moments, buffers, hyperparameters or number of micro-batches.

    Why it matters: each rank trains its own model. Averaged gradients of different models train none of them.

    How it is detected: checksums of the bits are compared, often at first and later in every 16th step. A parameter is
    a replica if DistributedDataParallel wraps it, or if all ranks have the same initial values of it, or the same
    gradients at the update.

    Exceptions: models that are divided among the ranks (tensor, sequence, expert and pipeline parallelism, FSDP);
    moments that one rank keeps for all; running statistics of norms; local SGD, as in ranks.gradients_differ.

    Usual cause: each rank initialized its own weights; each rank steps a scheduler by its own validation loss; only one
    rank loads or resets its weights.

    Fix: wrap the model in DistributedDataParallel, or broadcast the weights of rank 0; later, fix the cause (reduce the
    validation loss over the ranks before `scheduler.step(loss)`) and restore all ranks from one checkpoint.

    Sources: minimind #853, DALLE-pytorch #268, returnn #1493.
    """
    broken = [each for each in facts.disagreements if each.what in CAUSES_FIRST]
    if not broken:
        return
    first = min(broken, key=lambda each: (each.step, CAUSES_FIRST.index(each.what)))
    gradients = facts.disagreement("gradients")
    is_after_gradients = gradients is not None and first.step >= gradients.step
    if is_after_gradients and first.what in ("weights", "moments") and (reason := trains_locally(run, facts)):
        yield NotApplicable(reason)
        return
    what, writers = first.what.replace("micro_", "number of micro-"), sorted(facts.writers)
    at_begin = first.step == 0
    where, step = one_rank(first.ranks), max(1, first.step)
    symptom = f"the ranks do not have the same {what}{f' ({listed(first.names)})' if first.names else ''}"
    symptom += f", {since(first)}" + (f"; different on {in_ranks(first.ranks)}" if first.ranks else "")
    cause = f"some ranks alone changed their {what}"
    if writers and first.what in ("moments", "weights"):
        where, step = one_rank(writers), facts.writers[writers[0]]
        symptom = f"the weights of {in_ranks(writers)} changed after the update of step {step}, those of others did not"
        cause = "only this rank writes to its weights: it loads a checkpoint, averages or resets them"
    elif at_begin:
        cause = "each rank initialized its own weights, and those of rank 0 were not broadcast"
    elif first.names == ("lr",):
        cause = "each rank computes its learning rate by itself, from its own loss or count of steps"
        where = Where(rank=where.rank, source=first.source or None)
    yield run.finding(
        max(1, facts.newest),
        symptom=symptom,
        cause=cause,
        stage="input" if at_begin or writers else "buffers",
        since_step=step,
        where=where,
        evidence=[
            (f"{each.what}: first step that differs", each.step, None if each.agreed < 0 else f"same in {each.agreed}")
            for each in broken
        ],
        explains=("ranks.gradients_differ",) if at_begin or writers or first.what == "micro_batches" else (),
    )
