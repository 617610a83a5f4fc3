from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.checkpoint import ResumeFacts

MIN_UPDATES = 8  # Updates after which it is known whether a schedule is stepped once per update


@check(stage="update", confidence=0.8, needs=ResumeFacts, points_at="schedule")
def schedule_starts_again(run: RunContext) -> Results:
    """The optimizer goes on with moments of an earlier run, and its schedule starts again; or the other way round.

    How it is detected: the updates that the moments have seen are compared with the steps of the schedule at the first
    update, where the schedule is stepped once an update.

    Exceptions: schedules that are stepped by epochs, and optimizers that count nothing.

    Usual cause: one of the two states was loaded, or the schedule was made after the state of the optimizer was loaded.

    Fix: save and load `optimizer.state_dict()` and `scheduler.state_dict()` together, after both are made.
    """
    facts = run.measured(ResumeFacts)
    for schedule in facts.schedules:
        if schedule.updates < MIN_UPDATES or abs(schedule.calls - schedule.updates) > 1:
            continue
        for optimizer in facts.optimizers:
            starts_again = optimizer.steps > 1 and schedule.before <= 1
            lost_moments = schedule.before > 1 and not optimizer.with_state and optimizer.kind != "SGD"
            if starts_again or lost_moments:
                yield run.finding(
                    1,
                    symptom=f"{optimizer.kind} has moments of {optimizer.steps} updates, and its schedule has seen "
                    f"{schedule.before}",
                    since_step=1,
                    evidence=[("updates that the schedule has seen", schedule.before, optimizer.steps)],
                )
                return
