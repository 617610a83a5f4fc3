from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.weights import WeightsFacts


@check(stage="update", confidence=0.95)
def learning_rate_negative(run: RunContext, facts: WeightsFacts) -> Results:
    """The learning rate is below 0, so the update raises the loss.

    How it is detected: the learning rate of every parameter group at every update.

    Usual cause: a factor of the schedule becomes negative: a cosine without `1 +`, or a decay that continues after the
    end.

    Fix: print the learning rate of every step of the schedule before the run, and put `max(0.0, ...)` around it.
    """
    if facts.lowest_rate < 0.0:
        yield run.finding(
            symptom=f"the learning rate is {facts.lowest_rate:.3g} in step {facts.lowest_at}",
            since_step=facts.lowest_at,
            evidence=[("lowest learning rate", facts.lowest_rate, ">= 0")],
        )
