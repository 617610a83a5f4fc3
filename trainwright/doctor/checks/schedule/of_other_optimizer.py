from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts


@check(points_at=("scheduler", "schedule"), stage="loop", confidence=0.95, explains=("schedule.never_stepped",))
def of_other_optimizer(run: RunContext, facts: LearningRateFacts) -> Results:
    """A scheduler is stepped, but its optimizer never steps.

    How it is detected: the scheduler's optimizer does not step for two steps of the loop (20 if it shares no parameters
    with the watched models).

    Usual cause: the optimizer was recreated after the scheduler was made.

    Fix: create the scheduler with the optimizer that steps: `StepLR(optimizer, ...)` after the last `optimizer = ...`.

    Sources: accelerate#2665, HVPNeT#5 (objects from before a copy).
    """
    for each in facts.schedulers:
        if each.is_stray:
            yield run.finding(
                symptom=f"{each.kind} was stepped {each.calls} times, but its optimizer never was",
                sure=0.95 if each.shares else 0.8,
                since_step=max(1, each.since),
                evidence=[("steps of its optimizer", 0, each.calls)],
            )
