from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.averages import AveragesFacts


@check(stage="update", confidence=0.9, needs=AveragesFacts)
def average_never_moves(run: RunContext) -> Results:
    """A copy of the weights is evaluated instead of the model, and it never changes.

    How it is detected: a copy that is called without gradients twice or more, where the model is not, and whose weights
    keep their values.

    Exceptions: a teacher, which is called at more than every fourth step.

    Usual cause: the average is never updated, or the copy is from before the training.

    Fix: update the average after every step, from the weights of the model into those of the average.
    """
    facts = run.measured(AveragesFacts)
    called = [each for each in facts.copies if each.evaluations >= 2]
    if not called:
        yield NotApplicable("no copy of the weights is evaluated")
        return
    stale = [each for each in called if 4 * each.evaluations <= facts.since]
    if stale and not facts.own_evaluations and not any(each.has_moved for each in called):
        copy = stale[0]
        yield run.finding(
            run.last_step,
            symptom=f"a {copy.kind} with the shapes of {copy.of} was evaluated {copy.evaluations} times, and "
            f"its weights did not change in {facts.since} steps",
            evidence=[("evaluations of the model itself", facts.own_evaluations, copy.evaluations)],
        )
