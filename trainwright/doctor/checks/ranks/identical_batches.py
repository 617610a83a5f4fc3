from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.ranks import RanksFacts, in_ranks


@check(stage="input", explains=("ranks.same_random_numbers",), points_at="forward")
def identical_batches(run: RunContext, facts: RanksFacts) -> Results:
    """Several ranks train on the same batch in the same step, so the work of all but one is wasted.

    How it is detected: checksums of the inputs, else sample ids, are equal in at least two steps and in at least half
    of all compared steps.

    Exceptions: models that are divided among the ranks, which share a batch on purpose.

    Usual cause: each rank reads the full dataset in the same order.

    Fix: `DataLoader(..., sampler=DistributedSampler(dataset))` and `sampler.set_epoch(epoch)` before each epoch; for a
    stream, `itertools.islice(stream, rank, None, world_size)`.
    """
    alike = facts.coincidence("samples")
    if alike is not None and alike.is_no_chance:
        yield run.finding(
            max(1, facts.newest),
            symptom=f"{in_ranks(alike.ranks)} train on the same samples: in {alike.same} of {alike.compared} steps",
            since_step=alike.since,
            evidence=[("steps with equal batches", alike.same, 0)],
        )
