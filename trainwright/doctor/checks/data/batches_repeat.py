from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.data import MIN_SAME_STEPS, RowsFacts

MIN_EQUAL_MICRO_BATCHES = 3  # Equal micro-batches of a step. Two may be two passes over one batch, as in SAM.


@check(points_at="forward", stage="input")
def batches_repeat(run: RunContext, facts: RowsFacts) -> Results:
    """Step after step trains on the same batch.

    Why it matters: the model memorizes one batch; the rest of the data set is never read.

    How it is detected: by a hash of the rows that reach the model. 8 steps in a row have the same rows, and the data
    set has more, or a variable of the loop is a loader or generator of such batches; or all micro-batches of a step
    (three or more) are equal, in half of the steps.

    Exceptions: the batch is the full data set. A loop that makes several updates on each batch.

    Usual cause: the batch is fetched once before the loop, for example by `next(iter(loader))`, or the index of the
    batch or micro-batch does not advance.

    Fix: iterate over the loader, and use what each iteration returns.

        for x, y in loader:
            ...
    """
    if facts.steps < MIN_SAME_STEPS:
        return
    is_stuck = not facts.same_before or facts.same >= 2 * facts.same_before
    if facts.same >= MIN_SAME_STEPS - 1 and is_stuck and facts.whole > facts.batch:
        yield run.finding(
            symptom=f"{facts.same + 1} steps in a row, up to step {facts.same_to}, trained on the same {facts.batch} "
            f"rows of {facts.whole}",
            since_step=max(1, facts.same_to - facts.same),
            evidence=[("rows that were trained on", facts.distinct, facts.whole)],
        )
    elif facts.micro >= MIN_EQUAL_MICRO_BATCHES and 2 * facts.micro_steps >= min(facts.steps, MIN_SAME_STEPS):
        yield run.finding(
            symptom=f"all {facts.micro} micro-batches of a step are the same rows, in {facts.micro_steps} steps",
            sure=0.8,
            evidence=[("equal micro-batches in a step", facts.micro, 1)],
        )
    elif facts.same >= MIN_SAME_STEPS - 1 and is_stuck and facts.unread:
        yield run.finding(
            symptom=f"{facts.same + 1} steps in a row, up to step {facts.same_to}, trained on the same {facts.batch} "
            f"rows, while {facts.unread} has more",
            since_step=max(1, facts.same_to - facts.same),
            evidence=[("rows that were trained on", facts.distinct, f"those of {facts.unread}")],
        )
    elif facts.same >= MIN_SAME_STEPS - 1:
        yield NotApplicable(f"every step has the same {facts.batch} rows, and no larger set is known")
