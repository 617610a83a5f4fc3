from trainwright.doctor import Every, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts


@check(stage="update", confidence=0.95)
def group_lr_zero(run: RunContext, exams: Every[CallsFacts]) -> Results:
    """A parameter group has a learning rate of 0 while other groups have one above 0.

    How it is detected: at two examinations in a row, a group whose parameters get gradients has a learning rate of 0,
    and another group does not.

    Exceptions: a group with an `initial_lr` above 0, because a schedule may still raise its learning rate. It is
    reported only at the end of a run of more than 50 steps.

    Usual cause: a wrong variable or an integer division, such as `lr // 10`, in the list of groups.

    Looks like: schedule.learning_rate_zero, where all groups are at 0.

    Fix: `{"params": head.parameters(), "lr": 1e-3}`. To freeze on purpose: `requires_grad_(False)`.
    """
    every = exams[-2:]
    if len(every) < 2 or not run.steps:
        return
    (since, before), (step, now) = every
    for number, optimizer in enumerate(now.optimizers):
        alive = [group.lr for group in optimizer.groups if group.lr]
        for place, (group, was) in enumerate(zip(optimizer.groups, before.optimizers[number].groups)):
            may_rise = bool(group.initial_lr) and not (run.finished and len(run.steps) > 50)
            if group.lr == 0.0 == was.lr and group.with_grad and alive and not may_rise:
                yield run.finding(
                    step,
                    symptom=f"{group.parameters} parameters of group {place} get gradients and have a learning "
                    "rate of 0",
                    since_step=since,
                    evidence=[(f"lr of group {place}", 0.0, alive[0])],
                    trial=RemedyTrial("group_lr", {"optimizer": number, "group": place, "lr": alive[0]}),
                )
