from trainwright.doctor import NotApplicable, Passed, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts

MIN_STEPS = 48
"""Shorter runs may be trials."""
MIN_WASTED_FRACTION = 0.25
"""Fraction of the steps with a negligible learning rate. A cosine to 0 has a fiftieth."""
SEVERE_WASTED_FRACTION = 0.9


@check(
    points_at="schedule",
    stage="update",
    confidence=0.8,
    needs=LearningRateFacts,
    explains=("schedule.learning_rate_zero",),
)
def ends_too_early(run: RunContext) -> Results:
    """The learning rate is next to nothing long before the end of the run.

    Why it matters: the rest of the run learns nothing; it is an answer to why a longer run was no better.

    How it is detected: the rate is below a thousandth of its peak for nine tenths of the run so far (critical), or for
    a quarter of a run of 48 steps that is over.

    Usual cause: a schedule that was made for a shorter run or for another unit, or a factor that is applied too often.

    Fix: make the schedule as long as the run, in calls of `scheduler.step()`; print the rate of every step before.
    """
    facts = run.measured(LearningRateFacts)
    if not facts.peak:
        yield NotApplicable("no optimizer has a learning rate")
        return
    gone, steps = facts.exhausted, facts.steps
    is_most = gone is not None and steps >= 20 and steps - gone >= SEVERE_WASTED_FRACTION * steps
    if gone is not None and (
        is_most or (run.finished and steps >= MIN_STEPS and steps - gone > MIN_WASTED_FRACTION * steps)
    ):
        yield run.finding(
            run.last_step,
            symptom=f"the last {steps - gone} of {steps} updates were made below a thousandth of the highest learning "
            f"rate, {facts.peak:.3g}",
            severity="critical" if is_most else "warning",
            since_step=max(1, gone),
            evidence=[
                ("fraction of updates that change nothing", round(1 - gone / steps, 3), f"<= {MIN_WASTED_FRACTION}")
            ],
            trial=RemedyTrial("another_rate", {"lr": facts.peak}),
        )
    else:
        yield Passed(f"{steps} updates at up to {facts.peak:.3g}")
