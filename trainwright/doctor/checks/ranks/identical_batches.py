"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.shared_ranks import in_ranks


@check(stage="input", severity="warning", needs=RanksFacts)
def identical_batches(run: RunContext) -> Iterator[Result]:
    """Several ranks train on the same batch in the same step, so the work of all but one is wasted.

    How it is detected: checksums of the inputs, else sample ids, are equal in two compared steps and in half of all.

    Exceptions: models of which ranks hold parts (tensor parallelism), which share a batch on purpose.

    Usual cause: each rank reads the whole dataset in the same order.

    Fix: `DataLoader(..., sampler=DistributedSampler(dataset))` and `sampler.set_epoch(epoch)`; for an iterable dataset
    keep every n-th sample on rank n.
    """
    facts = run.latest(RanksFacts)
    if facts is None:
        return
    alike = facts.coincidence("samples")
    if alike is None or not alike.is_no_chance:
        return
    yield run.finding(
        max(1, facts.newest),
        symptom=f"{in_ranks(alike.ranks)} train on the same samples: in {alike.same} of {alike.compared} steps",
        cause="each rank reads the whole dataset in the same order, so the work of all but one is wasted",
        remedy="give the loader a DistributedSampler (and call its set_epoch), or another share to each rank",
        sure=0.9,
        stage="input",
        since_step=alike.since,
        evidence=[("steps with equal batches", alike.same, 0)],
        explains=("ranks.same_random_numbers",),
    )
